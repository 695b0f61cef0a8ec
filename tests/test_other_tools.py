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


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([*range(2), *[0] * 30, *[1] * 32], "expected 32 inputs in group 0, got 31"),
        ([0] * 64, "expected 32 inputs in group 0, got 64"),
        ([*[0] * 32, *[1] * 31, 2], "expected groups 0 to 1, got 0 to 2"),
        ([-1, *[0] * 31, *[1] * 32], "expected groups 0 to 1, got -1 to 1"),
    ],
)
def test_groups_of_inputs_that_are_none(groups: list[int], message: str, tmp_path: Path) -> None:
    data = Stored("I32", (COLUMNS,), np.array(groups, "<i4").tobytes())
    checkpoint = folder_of(ORDERED, tmp_path / "folder", tensors=lambda s: {**s, "g_idx": data})
    with pytest.raises(CheckpointError, match=f"g_idx: {message}"):
        linear_of(checkpoint)


def test_zero_points_and_orders_that_are_not_declared(tmp_path: Path) -> None:
    unordered = folder_of(ORDERED, tmp_path / "unordered", declared={"desc_act": False})
    with pytest.raises(CheckpointError, match=r"g_idx: .*\(desc_act: false\), got others"):
        linear_of(unordered)
    checkpoint = folder_of(ASYMMETRIC, tmp_path / "folder", declared={"sym": True})
    with pytest.raises(CheckpointError, match="qzeros: symmetric values are declared, whose zero"):
        linear_of(checkpoint)
    of_other = {"checkpoint_format": "gptq_v2", "format": "gptq_v2"}
    with pytest.raises(CheckpointError, match="whose zero point is 8, got others"):
        linear_of(folder_of(SYMMETRIC, tmp_path / "version", declared=of_other))


def test_a_zero_point_that_tools_read_in_two_ways(tmp_path: Path) -> None:
    def largest(stored: dict[str, Stored]) -> dict[str, Stored]:
        zeros = stored["qzeros"]
        return {**stored, "qzeros": zeros._replace(data=b"\xff" + zeros.data[1:])}

    checkpoint = folder_of(ASYMMETRIC, tmp_path / "folder", tensors=largest)
    with pytest.raises(CheckpointError, match=r"1 zero point.* stored as 255, .*as 0, and kernels"):
        linear_of(checkpoint)
    as_stored = {"checkpoint_format": "gptq_v2", "format": "gptq_v2"}
    read = linear_of(folder_of(ASYMMETRIC, tmp_path / "v2", declared=as_stored, tensors=largest))
    assert read.zero is not None
    assert read.zero[0, 0] == 127


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"dynamic": {f"-:{i}": {} for i in range(1001)}}, "at most 1000 names"),
        ({"dynamic": {"-:(?<=a)b": {}}}, "a regular expression"),
    ],
)
def test_a_gptq_declaration_that_is_not_understood(
    declared: dict[str, Any], message: str, tmp_path: Path
) -> None:
    checkpoint = folder_of(SYMMETRIC, tmp_path / "folder", declared=declared)
    with pytest.raises(DeclarationError, match=message):
        linear_of(checkpoint)


def test_rules_for_single_linears(tmp_path: Path) -> None:
    rules = {
        r"-:.*\.fc$": {},
        r"+:.*down_proj$": {"bits": 8, "group_size": 64, "desc_act": True},
        ".*up_proj$": {"sym": False},
    }
    scheme = declared_scheme(folder_of(SYMMETRIC, tmp_path / "f", declared={"dynamic": rules}))
    assert scheme is not None
    assert [
        str(scheme.of(f"model.layers.0.mlp.{leaf}_proj")) for leaf in ("down", "up", "gate")
    ] == [
        "gptq int8 per group of 64, inputs ordered by activation, activations none",
        "gptq int4 per group of 32, asymmetric, activations none",
        str(scheme).partition(";")[0],
    ]
    assert [scheme.is_excluded(name) for name in ("model.fc", "model.up_proj")] == [True, False]


def test_what_only_its_own_library_reads_is_refused_by_name(tmp_path: Path) -> None:
    for method in ("bitsandbytes", "torchao", "hqq", "aqlm", "vptq", "gguf", "eetq"):
        checkpoint = folder_of(SYMMETRIC, tmp_path / method, declared={"quant_method": method})
        with pytest.raises(DeclarationError, match=f"{method} is not read: .*\n  fix: dequantize"):
            declared_scheme(checkpoint)
