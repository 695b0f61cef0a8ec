"""What the tests of `verify` share: names, ways to break a folder, and how to read a report."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from draftquant.quantize.verify import VerifyReport
from handmade_numbers import nearest_e4m3
from tiny import (
    INDEX_FILE,
    Stored,
    read_tensors,
    store,
    values_of,
    write_tensors,
)

ATTENTION = "midlayer.self_attn."
Q = f"{ATTENTION}q_proj"
Tensors = dict[str, Stored]
INT4 = ("quark-int4", "quark-int4-order", "ct-int4")
FP8 = ("quark-fp8", "quark-fp8-static", "ct-fp8", "ct-fp8-static", "modelopt-fp8",
       "modelopt-fp8-pcpt")  # fmt: skip
STATIC = ("quark-int4-static", "quark-fp8-static", "ct-fp8-static", "modelopt-fp8")


def edit(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = read_tensors(folder)
    change(tensors)
    sharded = (folder / INDEX_FILE).exists()
    write_tensors(folder, tensors, sharded=sharded, metadata={"format": "pt"})


def edit_declaration(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


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


def codes_name(tensors: Tensors, module: str = Q) -> str:
    packed = f"{module}.weight_packed"
    return packed if packed in tensors else f"{module}.weight"


def faults_of(report: VerifyReport) -> str:
    assert not report.ok
    return "\n".join(map(str, report.faults))


def provenance_of(report: VerifyReport, scale: str) -> dict[str, Any]:
    """What draftquant.json records of a folder, as far as `verify` reads it."""
    return {
        "recipe": {"algorithm": {"scale": scale}},
        "source": {"tensor_sha256": dict(report.source_sha256)},
        "tensor_sha256": dict(report.output_sha256),
    }


def assert_only_fault(report: VerifyReport, where: str, what: str) -> None:
    assert len(report.faults) == 1, faults_of(report)
    assert report.faults[0].where.endswith(where)
    assert what in str(report.faults[0])


def codes_of(divided: Stored) -> Stored:
    return Stored("F8_E4M3", divided.shape, nearest_e4m3(values_of(divided)))
