"""Linears that other tools' own code stored, decoded bit for bit as that code decodes them.

GPTQModel 7.7, AutoRound 0.15.1 and AutoAWQ 0.2.9 wrote them: `other_tools.py` at commit 2c81f63f.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.stored.linear import StoredLinear
from draftquant.quantize.stored.stored_declaration import declared_scheme, stored_parts
from draftquant.recipes.errors import CheckpointError, DeclarationError
from tiny import Stored, write_tensors

LINEARS: Mapping[str, Any] = json.loads(
    Path(__file__).with_name("other_tools.json").read_text(encoding="utf-8")
)
ROWS, COLUMNS, MODULE = 32, 64, "model.layers.0.mlp.down_proj"
ASYMMETRIC, ORDERED = (
    "gptq 8 bits, groups of 16, asymmetric",
    "gptq 4 bits, groups of 32, asymmetric, ordered",
)
SYMMETRIC = "gptq 4 bits, groups of 32, symmetric"


def folder_of(
    name: str,
    folder: Path,
    *,
    declared: Mapping[str, Any] | None = None,
    tensors: Callable[[dict[str, Stored]], dict[str, Stored]] = lambda stored: stored,
) -> Checkpoint:
    """One linear of a tool, perhaps changed."""
    linear = LINEARS[name]
    stored = {
        suffix: Stored(one["dtype"], tuple(one["shape"]), base64.b64decode(one["data"]))
        for suffix, one in linear["tensors"].items()
    }
    folder.mkdir()
    config = {"quantization_config": {**linear["declared"], **(declared or {})}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    changed = tensors(stored)
    write_tensors(folder, {f"{MODULE}.{suffix}": tensor for suffix, tensor in changed.items()})
    return Checkpoint.open(folder)


def linear_of(checkpoint: Checkpoint) -> StoredLinear:
    declared = declared_scheme(checkpoint)
    assert declared is not None
    scheme = declared.of(MODULE)
    assert scheme is not None
    for suffix, part in stored_parts(scheme, ROWS, COLUMNS).items():
        assert part.fits(checkpoint.tensors.get(f"{MODULE}.{suffix}")), suffix
    return StoredLinear(checkpoint, scheme, MODULE, in_features=COLUMNS)


@pytest.mark.parametrize("name", LINEARS)
def test_a_linear_is_what_its_tool_makes_of_it(name: str, tmp_path: Path) -> None:
    linear = linear_of(folder_of(name, tmp_path / "folder"))
    whole = linear.decoded().dequantized()
    assert hashlib.sha256(whole.tobytes()).hexdigest() == LINEARS[name]["sha256"]
    parts = [linear.decoded(rows).dequantized() for rows in (range(3, 11), range(30, ROWS))]
    assert np.array_equal(np.concatenate(parts), whole[[*range(3, 11), *range(30, ROWS)]])
    both = zip(linear.ends(4, range(3, 11)), linear.ends(4, range(ROWS)), strict=True)
    for some, all_rows in both:
        assert np.array_equal(some, all_rows if np.isscalar(all_rows) else all_rows[3:11])


def test_groups_of_inputs_that_are_none(tmp_path: Path) -> None:
    for number, groups in enumerate((
        [*range(2), *[0] * 30, *[1] * 32], [0] * 64, [*[0] * 32, *[1] * 31, 2],
        [-1, *[0] * 31, *[1] * 32],
    )):  # fmt: skip
        data = Stored("I32", (COLUMNS,), np.array(groups, "<i4").tobytes())
        folder = tmp_path / f"{number}"
        stored = folder_of(ORDERED, folder, tensors=lambda s, data=data: {**s, "g_idx": data})
        with pytest.raises(CheckpointError):
            linear_of(stored)


def test_zero_points_and_orders_that_are_not_declared(tmp_path: Path) -> None:
    for name, declared in (
        (ORDERED, {"desc_act": False}), (ASYMMETRIC, {"sym": True}),
        (SYMMETRIC, {"checkpoint_format": "gptq_v2", "format": "gptq_v2"}),
    ):  # fmt: skip
        with pytest.raises(CheckpointError):
            linear_of(folder_of(name, tmp_path / name, declared=declared))


def test_a_zero_point_that_tools_read_in_two_ways(tmp_path: Path) -> None:
    def largest(stored: dict[str, Stored]) -> dict[str, Stored]:
        zeros = stored["qzeros"]
        return {**stored, "qzeros": zeros._replace(data=b"\xff" + zeros.data[1:])}

    checkpoint = folder_of(ASYMMETRIC, tmp_path / "folder", tensors=largest)
    with pytest.raises(CheckpointError):
        linear_of(checkpoint)
    as_stored = {"checkpoint_format": "gptq_v2", "format": "gptq_v2"}
    read = linear_of(folder_of(ASYMMETRIC, tmp_path / "v2", declared=as_stored, tensors=largest))
    assert read.zero is not None
    assert read.zero[0, 0] == 127


def test_a_declaration_that_is_not_understood(tmp_path: Path) -> None:
    """Or that only its own library reads, which is named."""
    methods = ("bitsandbytes", "torchao", "hqq", "aqlm", "vptq", "gguf", "eetq")
    for number, declared in enumerate((
        {"dynamic": {f"-:{i}": {} for i in range(1001)}}, {"dynamic": {"-:(?<=a)b": {}}},
        *({"quant_method": method} for method in methods),
    )):  # fmt: skip
        checkpoint = folder_of(SYMMETRIC, tmp_path / f"{number}", declared=declared)
        with pytest.raises(DeclarationError):
            linear_of(checkpoint)
