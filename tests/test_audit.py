"""`inspect` on quantized folders: figures worked out independently, and every fault triggered."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.stored.stored_declaration import looks_quantized
from draftquant.quantize.verify.audit import Audit, audit_checkpoint
from draftquant.scripts.cli import main
from handmade import MADE, by_hand, quantize_by_hand, stored_parts
from handmade_numbers import Rounded, codes_under
from tiny import Stored, fused_absmax, read_tensors, store, tiny_eagle3_llama, values_of
from verify_cases import (
    ATTENTION,
    Copy,
    Q,
    Tensors,
    copy_of,
    edit,
    edit_declaration,
    made,
    set_scale,
    source,
)

__all__ = ["copy_of", "made", "source"]  # fixtures
Change = Callable[[Tensors], Any]


def audited(folder: Path) -> Audit:
    checkpoint = Checkpoint.open(folder)
    assert looks_quantized(checkpoint)
    return audit_checkpoint(checkpoint)


def faults_of(folder: Path) -> list[str]:
    return [str(fault) for fault in audited(folder).faults]


def assert_only_fault(folder: Path, *parts: str) -> None:
    faults = faults_of(folder)
    assert len(faults) == 1, faults
    for part in parts:
        assert part in faults[0]


# ---- faults


def replaced(name: str, change: Callable[[Stored], Stored]) -> Change:
    return lambda tensors: tensors.__setitem__(name, change(tensors[name]))


def codes_of_an_embedding(tensors: Tensors) -> None:
    shape, scale = tensors["embed_tokens.weight"].shape, tensors[f"{Q}.weight_scale"]
    codes = Stored("F8_E4M3", shape, b"\x7e" * int(np.prod(shape)))
    tensors.update({"embed_tokens.weight": codes, "embed_tokens.weight_scale": scale})


def keep_k(tensors: Tensors) -> None:
    """All of k_proj as it was, in floating point."""
    for name in [name for name in tensors if name.startswith(f"{ATTENTION}k_proj.")]:
        del tensors[name]
    tensors[f"{ATTENTION}k_proj.weight"] = store(np.zeros((32, 128)), "BF16")


@pytest.mark.parametrize(
    ("name", "change", "parts"),
    [
        ("quark-int4", lambda t: t.__setitem__("norm.weight_scale", t["norm.weight"]),
         ["norm: expected only linears of eagle3-llama to be quantized"]),
        ("quark-fp8", replaced(f"{Q}.weight", lambda t: t._replace(
            data=t.data[:300] + b"\x7f" + t.data[301:])),
         [f"{Q}.weight: expected quantized values that are numbers", "NaN(s), first at row 2, c"]),
    ],
)  # fmt: skip
def test_a_fault_of_tensors(copy_of: Copy, name: str, change: Change, parts: list[str]) -> None:
    out = copy_of(name)
    assert faults_of(out) == []
    edit(out, change)
    assert_only_fault(out, *parts)
    json.dumps(audited(out).to_mapping(), allow_nan=False)


def test_faults_of_the_declaration(copy_of: Copy, source: Path) -> None:
    missed, mixed = copy_of("quark-int4"), copy_of("quark-fp8")
    edit_declaration(missed, lambda d: d["exclude"].remove("model.fc"))
    assert_only_fault(missed, "config.json: model.fc: expected excluded: it is kept")
    edit(mixed, keep_k)
    said = f"expected all or none of them quantized, got kept: {ATTENTION}k_proj"
    assert any(said in fault for fault in faults_of(mixed))
    assert len(audited(mixed).linears) == 6
    edit(mixed, codes_of_an_embedding)
    assert any("embed_tokens: expected" in f and "never quantized" in f for f in faults_of(mixed))
    # Quantized tensors without a declaration, and a declaration without such tensors.
    bare = copy_of("ct-int4")
    edit_declaration(bare, lambda d: d["config_groups"]["group_0"].update(targets=["re:.*mlp.*"]))
    assert any(f"{Q}: expected a group that targets it, got none" in f for f in faults_of(bare))
    shutil.copyfile(source / "config.json", bare / "config.json")
    said = "config.json: quantization_config: expected a declaration"
    assert_only_fault(bare, said, "7 linears stored as weight")
    found = audited(bare)
    assert (found.scheme, {linear.codes for linear in found.linears}) == (None, {None})
    shutil.copyfile(source / "model.safetensors", missed / "model.safetensors")
    assert_only_fault(missed, "expected linears stored as quark int4", "got none")


def test_fp4_codes_up_to_half_of_the_largest_and_negative_scales(copy_of: Copy) -> None:
    """Negative INT4 scales are no fault: AutoRound writes them."""
    autoround = copy_of("ct-int4")
    edit(autoround, replaced(f"{Q}.weight_scale", lambda t: set_scale(t, -0.5)))
    assert faults_of(autoround) == []
    quark = copy_of("quark-int4")
    edit(quark, replaced(f"{Q}.weight_scale", lambda t: set_scale(t, -0.5)))
    assert faults_of(quark) != []
    out = copy_of("modelopt-nvfp4")
    edit(out, replaced(f"{Q}.weight", lambda t: t._replace(data=b"\x55" * len(t.data))))
    assert_only_fault(out, f"{Q}.weight: expected codes up to 6", "got none beyond 3 in the whole")


def test_scales_fit_whose_largest_code_is_the_top_one(copy_of: Copy, source: Path) -> None:
    """Every second row has a scale too large, under which the next smaller code is the largest."""
    out, made = copy_of("ct-int4"), MADE["ct-int4"]
    weight, largest = read_tensors(source)[f"{Q}.weight"], fused_absmax(read_tensors(source), Q)
    right = by_hand(weight, made, largest)
    scale = right.scale.copy()
    scale[::2] *= np.float32(1.2)  # 7.5 / 1.2 = 6.25
    scale = values_of(store(scale, "BF16"))
    codes = codes_under(values_of(weight), made.dtype, made.granularity, scale, right.whole)
    parts = stored_parts(Rounded(codes, scale, right.whole), "BF16", made)
    edit(out, lambda tensors: tensors.update({f"{Q}.{s}": part for s, part in parts.items()}))
    (found,) = (linear.codes for linear in audited(out).linears if linear.module == Q)
    assert found is not None
    assert found.scales_fit == 0.5


@pytest.mark.parametrize("factor", [1.0, 0.01])
def test_a_half_that_one_scale_rounded_away_is_advised_on(
    factor: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedding's half of the concat input, which is far smaller than the other."""
    draft = tiny_eagle3_llama(tmp_path / "draft")

    def smaller(tensors: Tensors) -> None:
        values = values_of(tensors[f"{Q}.weight"]).copy()
        values[:, : values.shape[1] // 2] *= factor
        tensors[f"{Q}.weight"] = store(values, "BF16")

    edit(draft, smaller)
    assert main(["inspect", str(quantize_by_hand(draft, tmp_path / "out", MADE["ct-int4"]))]) == 0
    (said,) = (line for line in capsys.readouterr().out.splitlines() if f"{Q}: " in line)
    assert ("rounded the smaller one away" in said) is (factor < 1)
