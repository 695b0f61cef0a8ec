"""What the tests of `verify` share: names, ways to break a folder, and how to read a report."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import by_recipe
import numpy as np
import pytest
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.provenance import Method
from draftquant.quantize.stored.stored_declaration import declared_scheme
from draftquant.quantize.verify import VerifyReport
from draftquant.recipes import ActivationFormat, Algorithm, Recipe, WeightFormat, load_recipe
from handmade import MADE, quantize_by_hand
from tiny import (
    INDEX_FILE,
    Stored,
    read_tensors,
    store,
    tiny_eagle3_llama,
    values_of,
    write_tensors,
)

BASE = load_recipe("fp8-ptpc")
ATTENTION = "midlayer.self_attn."
Q = f"{ATTENTION}q_proj"
Tensors = dict[str, Stored]
ACTIVATIONS = {
    "none": None,
    "token-dynamic": ActivationFormat(dtype="fp8_e4m3", granularity="token", dynamic=True),
    "tensor-static": ActivationFormat(dtype="fp8_e4m3", granularity="tensor", dynamic=False),
    "group-dynamic": ActivationFormat(dtype="fp8_e4m3", granularity="group", dynamic=True),
    "nvfp4": ActivationFormat(dtype="nvfp4", granularity="group", dynamic=True),
    "mxfp4": ActivationFormat(dtype="mxfp4", granularity="group", dynamic=True),
}
STATIC = ("quark-int4-static", "quark-fp8-static", "ct-fp8-static", "modelopt-fp8")
Copy = Callable[[str], Path]


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_eagle3_llama(tmp_path_factory.mktemp("verify") / "source", pruned_vocabulary=True)


@pytest.fixture(scope="session")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A correct folder of each layout without the package; tests change copies."""
    folder = tmp_path_factory.mktemp("made")

    def make(name: str) -> Path:
        out = folder / name
        return out if out.is_dir() else quantize_by_hand(source, out, MADE[name])

    return make


@pytest.fixture
def copy_of(made: Copy, tmp_path: Path) -> Copy:
    return lambda name: Path(shutil.copytree(made(name), tmp_path / name))


def edit(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = read_tensors(folder)
    change(tensors)
    sharded = (folder / INDEX_FILE).exists()
    write_tensors(folder, tensors, sharded=sharded, metadata={"format": "pt"})


def edit_declaration(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def flip_bit(tensor: Stored, bit: int) -> Stored:
    data = bytearray(tensor.data)
    data[bit // 8] ^= 1 << bit % 8
    return tensor._replace(data=bytes(data))


def set_scale(tensor: Stored, value: float) -> Stored:
    values = values_of(tensor).copy()
    values.reshape(-1)[0] = value
    if tensor.dtype == "BF16" and not math.isfinite(value):
        bits = np.frombuffer(tensor.data, np.uint16).copy()
        bits[0] = 0x7FC0 if math.isnan(value) else 0x7F80
        return tensor._replace(data=bits.tobytes())
    return store(values, tensor.dtype)


def faults_of(report: VerifyReport) -> str:
    assert not report.ok
    return "\n".join(map(str, report.faults))


def recipe_of(folder: Path, scale: Literal["absmax", "mse"] = "absmax") -> Recipe:
    """The recipe that asks for what a folder declares."""
    scheme = declared_scheme(Checkpoint.open(folder))
    assert scheme is not None
    scales = {t.dtype for n, t in read_tensors(folder).items() if n.endswith("scales")}
    same = {n: getattr(scheme, n) for n in ("granularity", "group_size", "first_stage")}
    scale_dtype = "float16" if "F16" in scales else None
    weights = WeightFormat(
        dtype=scheme.weight_dtype, symmetric=True, scale_dtype=scale_dtype, **same
    )
    inputs, algorithm = ACTIVATIONS[scheme.activations], Algorithm(scale=scale, rounding="nearest")
    base = replace(BASE, layout=scheme.layout.name, weights=weights, activations=inputs)
    return replace(base, algorithm=algorithm)


def input_scales_of(folder: Path) -> dict[str, float]:
    """As stored, by module; compressed-tensors stores the inverse of NVFP4's."""
    scales = {}
    for name, tensor in read_tensors(folder).items():
        module, _, suffix = name.rpartition(".")
        if suffix in ("input_scale", "input_global_scale"):
            value = float(values_of(tensor).item())
            scales[module] = value if suffix == "input_scale" else 1 / value
    return scales


def method_of(folder: Path, scale: Literal["absmax", "mse"] = "absmax") -> Method:
    """How this package would have made a folder."""
    return Method(recipe=recipe_of(folder, scale), input_scales=input_scales_of(folder))


def quantized(
    source: Path, out: Path, recipe: str | Recipe, *, scale: float = 0.375, **options: Any
) -> Method:
    """Quantize in torch's arithmetic, under one static scale of every input that needs one."""
    report = by_recipe.quantized(source, recipe, out, scale=scale, **options)
    own, static = report.plan.recipe, report.plan.recipe.needs_input_scales
    scales = {step.row.module: scale for step in report.plan.quantized if static}
    return Method(recipe=own, input_scales=scales, balanced=report.balanced)


def quantized_folder(source: Path, out: Path, recipe: str | Recipe, **options: Any) -> Path:
    quantized(source, out, recipe, **options)
    return out


def reseal(folder: Path) -> None:
    """Give an edited draftquant.json the seal of what it says now."""
    content = json.loads((folder / "draftquant.json").read_text(encoding="utf-8"))
    content.pop("sha256", None)
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
    (folder / "draftquant.json").write_text(json.dumps(content), encoding="utf-8")


def assert_only_fault(report: VerifyReport, where: str, what: str) -> None:
    assert len(report.faults) == 1, faults_of(report)
    assert report.faults[0].where.endswith(where)
    assert what in str(report.faults[0])
