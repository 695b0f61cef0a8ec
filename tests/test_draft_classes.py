"""Every class of drafts that vLLM 0.33 and SGLang 0.5.23 load: roles, quantized and verified."""

from pathlib import Path

import draftquant.api as dq
import draftquant.quantize.drafts.architectures as names
import pytest
from draft_classes import CLASSES, TABLE, tensors, write
from draftquant.quantize.drafts.architectures import with_family_name
from draftquant.quantize.drafts.families import FAMILIES
from draftquant.recipes.errors import DraftQuantError
from told import check_told

pytestmark = pytest.mark.usefixtures("one_thread")
QUANTIZED = {"attention", "mlp"}
"""Roles that `fp8-ptpc` quantizes where no family has other rules."""


def test_rules_give_the_roles_of_the_engines_source(tmp_path: Path) -> None:
    for name in CLASSES:
        found = dq.inspect(write(name, tmp_path / name)).to_mapping()
        assert found["family"] == "unknown"
        expected = {tensor: role for tensor, role, *_ in tensors(name)}
        assert {t["name"]: t["role"] for t in found["tensors"]} == expected, name
        unnamed = [t for t in found["tensors"] if t["given_by"] == "no rule"]
        assert all(len(t["shape"]) == 1 for t in unnamed), name


@pytest.mark.some(3)
@pytest.mark.parametrize("name", CLASSES)
def test_what_is_made_of_a_class_is_verified(name: str, tmp_path: Path) -> None:
    expected = {tensor: role for tensor, role, *_ in tensors(name)}
    source, out = write(name, tmp_path / "draft"), tmp_path / "out"
    if said := CLASSES[name].get("refused"):
        with pytest.raises(DraftQuantError, match=said):
            dq.plan(source, "fp8-ptpc")
        return
    report = dq.quantize(source, "fp8-ptpc", out=out)
    matrices = {tensor for tensor, role in expected.items() if role in QUANTIZED}
    assert {step.row.tensor.name for step in report.plan.quantized} == matrices
    assert dq.verify(out, against=source).ok
    for folder in (source, out):
        assert dq.check(folder, engine="vllm", gpu="h200").verdict != "LOADS"


@pytest.mark.parametrize("name", TABLE["known"])
def test_a_class_that_is_said_to_be_read_is_read_by_that_family(name: str) -> None:
    found = with_family_name({"architectures": [name]}, (), {})["architectures"][0]
    assert TABLE["known"][name] in {f.name for f in FAMILIES if found in f.architectures}


def test_names_that_are_known_of_other_drafts() -> None:
    """One that is missing by mistake is a name that nobody knows: what a draft is is not said."""
    facts = {"read as": dict(names.OTHER_NAMES), "marks": dict(names.MARKS)}
    facts |= {"in vLLM": dict(names.REWRITTEN_BY_VLLM), "both": sorted(names.KNOWN_TO_BOTH)}
    check_told("families", {"of other drafts": facts})
