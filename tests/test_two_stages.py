"""INT4 per channel of FP8 values: what Quark 0.13 calls a progressive spec, and AMD int4_fp8."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.files.checkpoint import PROVENANCE_FILE, Checkpoint
from draftquant.quantize.stored.layouts.scheme import DeclaredScheme
from draftquant.quantize.stored.stored_declaration import declared_scheme
from draftquant.quantize.verify import verify
from draftquant.recipes import load_recipe
from draftquant.recipes.errors import VerifyError
from tiny import read_tensors, tiny_eagle3_llama
from verify_cases import edit, edit_declaration, flip_bit, quantized_folder
from weight_formats import TWO_STAGES

RECIPE = dataclasses.replace(load_recipe("mi325x-w4a8"), backend="torch", weights=TWO_STAGES)
UP = "midlayer.mlp.up_proj"


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_eagle3_llama(tmp_path_factory.mktemp("two") / "draft", pruned_vocabulary=True)


@pytest.fixture
def folder(draft: Path, tmp_path: Path) -> Path:
    """Without draftquant.json, whose hashes would find any change."""
    out = quantized_folder(draft, tmp_path / "copy", RECIPE)
    (out / PROVENANCE_FILE).unlink()
    return out


def scheme_of(folder: Path) -> DeclaredScheme:
    scheme = declared_scheme(Checkpoint.open(folder))
    assert scheme is not None
    return scheme


BITS = {  # of scales the lowest bit of an exponent: twice or half
    "weight": 8 * 101 + 2, "weight_scale": 8 * 2 + 7, "weight_scale_2": 8 * 6 + 7,
    "weight_zero_point_2": 8 + 4,
}  # fmt: skip


def test_one_flipped_bit_is_found_without_provenance(folder: Path, draft: Path) -> None:
    report = verify(folder, draft, foreign=True)
    assert report.ok, report.faults
    # The two stages of Gaussian rows of 64 to 128; the report's figure is that of both.
    assert all(0.08 < linear.relative_l2_error < 0.2 for linear in report.linears)
    right = read_tensors(folder)
    for suffix, bit in BITS.items():
        name = f"{UP}.{suffix}"
        edit(folder, lambda t, n=name, bit=bit: t.update(right | {n: flip_bit(right[n], bit)}))
        faults = verify(folder, draft, foreign=True).faults
        assert name in {fault.where for fault in faults}
        assert all(fault.where.startswith("midlayer.mlp.") for fault in faults)


DECLARED: dict[str, tuple[Callable[[list[dict[str, Any]]], object], str]] = {
    "one stage in a list": (lambda w: w.pop(0), ""),
    "three stages": (lambda w: w.append(w[1]), "weight[2]: understood is int4 per channel, of two"),
    "the other way round": (lambda w: w.reverse(), "weight[1]: understood is int4 per channel"),
    "no stage": (lambda w: w.clear(), "weight: understood is a JSON object, got []"),
    "a key that is not known": (lambda w: w[1].update(mx=1), "weight[1].mx (unknown key)"),
}


@pytest.mark.parametrize("case", DECLARED)
def test_declared_stages(case: str, folder: Path) -> None:
    change, message = DECLARED[case]
    edit_declaration(folder, lambda d: change(d["global_quant_config"]["weight"]))
    if not message:
        assert scheme_of(folder).first_stage is None
        return
    with pytest.raises(VerifyError) as caught:
        scheme_of(folder)
    assert message in str(caught.value)
