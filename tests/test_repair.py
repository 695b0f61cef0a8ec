"""`check --fix`: what is wrong in the JSON of a folder is repaired, the rest is left and said."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.engines import check_draft
from draftquant.quantize.engines.repairs import (
    RepairPlan,
    plan_repairs,
    repair_draft,
    repaired_copy,
)
from draftquant.quantize.errors import CheckpointError, OutputError, VerifyError
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.verify import verify
from draftquant.quantize.verify.audit import audit
from draftquant.scripts.cli import main
from tiny import Stored, edit_json, read_tensors, tiny_eagle3_llama, write_tensors
from verify_cases import Q, edit, edit_declaration, flip_bit

sys.path.append(str(Path(__file__).parent / "engines"))  # its modules stand alone

from broken import BROKEN, CT_FP8, FP8, MODELOPT_FP8, QUARK_FP8, QUARK_INT4
from cases import FAMILIES, NUM_TARGET_LAYERS, Workshop, break_folder
from edits import O_PROJ, Broken, declare, excludes, kept, nested, without_method
from formats import format_recipe

QUARK_INT4_CHANNEL = ("quark", "int4-channel", "weights-only")
PLATFORMS = (
    ("vllm", "sm90"),
    ("vllm", "sm100"),
    ("sglang", "sm90"),
    ("sglang", "sm100"),
    ("sglang", "gfx942"),
)
LAYERS = {"layers-nested-only", "layers-at-the-top-only", "layers-as-inputs"}
"""One place names the target's layers, or in one convention only: a lint writes both."""
RIGHT = {
    "layers-in-both-places",
    "layers-nowhere",
    "awq-bfloat16",
    "awq-per-channel",
    "ct-fp8-block-small-heads",
    "ct-fp8-block-split-rows",
    "eagle31",
    "eagle31-old-names",
    "fp8-block-small-heads",
    "fp8-block-split-inputs",
    "fp8-fnuz",
    "group-splits-shard",
    "group-splits-shard-awq",
    "group-splits-shard-nvfp4",
    "kv-head-in-each-shard",
    "mla-eagle31",
    "mla-norm-before-fc",
    "norm-before-fc",
    "nvfp4-global-scale-shared",
    "o-proj-kept-modelopt",
    "o-proj-kept-regex",
    "qkv-kept-with-alias",
    "qwen3",
    "qwen3-ordinary",
    "qwen3-qkv-kept",
    "rope-missing",
    "ct-scales-without-axis",
    "mla-two-layers",
    "mla-two-layers-hidden-norm",
    "plain-two-layers",
    "quark-scales-with-axis",
    "speculators",
    "speculators-dflash",
    "speculators-plain",
    "speculators-qwen3",
    "tied-head-no-draft-vocab",
    "two-layers",
    "two-layers-hidden-norm",
    "two-layers-int4",
    "vocabulary-padded",
}
"""Their JSON says what their tensors are: an engine may still have no use for them."""
WITHOUT_EMBEDDING = "mla-ignore-default-all"
"""Its list lacks the embedding, which no engine asks for; fc, quantized, stays out of it."""
LEFT = {
    "architecture-qwen3-eagle3": "no supported draft family has",
    "awq-without-config": "nothing declares how",
    "eagle31-without-flag": "fc_norm.0.weight: no tensor of eagle3-llama",
    "embedding-quantized": "no list is right for every engine",
    "embedding-without-scales": "no list is right for every engine",
    "embedding-of-another-vocabulary": "the tensors are not those of a draft",
    "dflash-architecture-qwen3": "no supported draft family has",
    "dflash-o-proj-kept-layer-index": "no list is right for every engine",
    "dflash-o-proj-kept-modelopt": "no list is right for every engine",
    "fc-quantized": None,
    "fp8-without-config": "nothing declares how",
    "group-splits-shard-quark": "is not proven",
    "head-quantized": None,
    "input-scale-missing": None,
    "int4-without-config": "nothing declares how",
    "linear-missing": "the tensors are not those of a draft",
    "mla-architecture-eagle3": "no supported draft family has",
    "mla-kv-b-quantized": None,
    "mla-q-a-alone-kept": "no list is right for every engine",
    "model-type-missing": None,
    "norm-before-fc-without-flag": "input_norm.weight: no tensor of eagle3-llama",
    "norms-of-heads": "the tensors are not those of a draft",
    "nvfp4-global-scales-differ": None,
    "q-proj-alone-kept": "no list is right for every engine",
    "qwen3-without-norms": "the tensors are not those of a draft",
    "speculators-declared-inside": "nothing declares how",
    "speculators-dflash-without-mask": "mask_token_id: missing key",
    "speculators-dflash-without-positions": None,
    "speculators-mistral": "got 'mistral'",
    "speculators-without-activation": None,
    "speculators-without-config": None,
    "quark-pack-label": "is not proven",
    "stray-bias": None,
    "weight-scale-missing": None,
}
"""The fault is in the tensors, or cannot be said in the layout -> the note, if there is one."""
NOT_SEEN = {
    "awq-nothing-excluded",
    "ct-compression-config",
    "modelopt-method-fp8",
    "modelopt-nested-dflash",
    "modelopt-side-file-disagrees",
    "modelopt-side-file-only",
}
"""Faults that no prediction of loading sees: vLLM and SGLang read what is right."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("repair"))


class Case:
    """A quantized folder, the draft that it was made from, and a broken copy of it.

    The quantized folder is made once for all cases that break it.
    """

    def __init__(self, workshop: Workshop, broken: Broken, out: Path) -> None:
        made_of = [broken.family, *broken.formats, *map(str, broken.source.items())]
        self.healthy = workshop.out / "-".join(made_of)
        original = workshop.out / f"source-{self.healthy.name}"
        if not original.exists():
            workshop.source(broken.family, **broken.source).rename(original)
            workshop.quantize(original, format_recipe(*broken.formats), self.healthy.name)
        self.source, self.folder, self.out = out / "source", out / "broken", out / "repaired"
        shutil.copytree(original, self.source)
        shutil.copytree(self.healthy, self.folder)
        break_folder(self.folder, self.source, broken.edit)

    def plan(self, **changes: Any) -> RepairPlan:
        arguments = {"engine": "vllm", "target_layers": NUM_TARGET_LAYERS} | changes
        return plan_repairs(self.folder, **arguments)

    def repair(self, **changes: Any) -> RepairPlan:
        plan = self.plan(**changes)
        repair_draft(plan, self.out, source=DraftSource(folder=self.folder), argv=["fix"])
        return plan


def verdicts(folder: Path) -> list[str]:
    return [
        check_draft(folder, engine=engine, arch=arch, target_layers=NUM_TARGET_LAYERS).verdict
        for engine, arch in PLATFORMS
    ]


def names(plan: RepairPlan) -> list[str]:
    """Repairs, without what the lints of every tiny draft ask for."""
    found = [repair.name for repair in plan.repairs]
    return [name for name in found if name not in ("aux-layer-ids", "dtype-missing")]


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.some(20)
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_broken_folders(workshop: Workshop, tmp_path: Path, broken: Broken) -> None:
    """After repair an engine does with a folder what it does with one that was never broken."""
    case = Case(workshop, broken, tmp_path)
    assert names(plan_repairs(case.healthy, engine="vllm")) == []
    before, bytes_before = verdicts(case.folder), content(case.folder)
    plan = case.repair()
    assert content(case.folder) == bytes_before
    assert read_tensors(case.out) == read_tensors(case.folder)
    after = verdicts(case.out)
    if broken.name in RIGHT:
        assert names(plan) == []
        assert (after, plan.notes) == (before, ())
    elif broken.name in LAYERS:
        assert [repair.name for repair in plan.repairs] == ["aux-layer-ids"]
        assert "LOADS BUT WRONG" in before
        assert set(after) == {"LOADS"}
    elif broken.name == WITHOUT_EMBEDDING:
        assert names(plan) == ["excludes"]
        assert after == before
    elif broken.name in LEFT:
        note = LEFT[broken.name]
        assert names(plan) == []
        assert after == before
        assert any(note in text for text in plan.notes) if note else not plan.notes
    else:
        assert names(plan) != []
        assert (after == before) == (broken.name in NOT_SEEN)
        assert after == verdicts(case.healthy)
        assert "LOADS" in after


def general(name: str, formats: tuple[str, str, str], edit: Any, family: Any) -> Broken:
    return Broken(name=f"{family}-{name}", what=name, formats=formats, edit=edit, family=family)


WITHOUT_FC = {("language-model", "bare"), ("language-model", "stars")}
"""Excludes of an fc that there is none of do no harm."""


@pytest.mark.each_value
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("name", "formats", "break_it", "engine", "repair"),
    [
        ("bare", QUARK_FP8, excludes("fc", "lm_head"), "vllm", "excludes"),
        ("everything", CT_FP8, excludes("re:.*"), "sglang", "excludes"),
        ("no-expression", CT_FP8, excludes("re:*fc"), "vllm", "excludes"),
        ("stars", FP8, excludes("*fc*"), "vllm", "excludes"),
        ("model-star", MODELOPT_FP8, excludes("eagle_module.fc", "model*"), "vllm", "excludes"),
        ("nested", MODELOPT_FP8, nested, None, "declaration"),
        ("no-method", MODELOPT_FP8, without_method, "vllm", "quant-method"),
    ],
)
def test_every_family(
    workshop: Workshop,
    tmp_path: Path,
    family: Any,
    name: str,
    formats: tuple[str, str, str],
    break_it: Any,
    engine: str | None,
    repair: str,
) -> None:
    case = Case(workshop, general(name, formats, break_it, family), tmp_path)
    if engine is not None and (family, name) not in WITHOUT_FC:
        assert check_draft(case.folder, engine=engine, arch="sm90").verdict != "LOADS"
    plan = case.repair(against=case.source)
    assert repair in names(plan)
    assert plan.notes == ()
    assert verdicts(case.out) == verdicts(case.healthy)
    assert verify(case.out, case.source).ok
    assert names(plan_repairs(case.out, engine="vllm")) == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_modelopt_exports_of_a_draft(workshop: Workshop, tmp_path: Path, engine: str) -> None:
    """Its nested form without quant_method, whose `model*` excludes every layer of the draft."""

    def exported(folder: Any) -> None:
        folder.exclude(["eagle_module.fc", "lm_head", "model*"])
        nested(folder)

    case = Case(workshop, general("exporter", MODELOPT_FP8, exported, "eagle3-llama"), tmp_path)
    assert check_draft(case.folder, engine=engine, arch="sm90").verdict != "LOADS"
    assert names(case.repair(against=case.source)) == ["declaration", "excludes", "side-file"]
    assert check_draft(case.out, engine=engine, arch="sm90").verdict == "LOADS"
    declared = json.loads((case.out / "config.json").read_text(encoding="utf-8"))[
        "quantization_config"
    ]
    beside = json.loads((case.out / "hf_quant_config.json").read_text(encoding="utf-8"))[
        "quantization"
    ]
    wanted = ["*embed_tokens*", "*fc*", "*lm_head*"]
    assert declared["ignore"] == declared["exclude_modules"] == wanted
    assert beside["exclude_modules"] == wanted
    assert verify(case.out, case.source).ok


# Pack order


def mislabelled(formats: tuple[str, str, str]) -> Broken:
    def edit_label(folder: Any) -> None:
        folder.quantization["export"]["pack_method"] = "order"

    return general("label", formats, edit_label, "eagle3-llama")


@pytest.mark.parametrize("formats", [QUARK_INT4, QUARK_INT4_CHANNEL])
def test_a_mislabelled_pack_order_is_proven(
    workshop: Workshop, tmp_path: Path, formats: tuple[str, str, str]
) -> None:
    case = Case(workshop, mislabelled(formats), tmp_path)
    faults = [str(fault) for fault in verify(case.folder, case.source).faults]
    assert any("expected the quantized values nearest to weight/scale" in fault for fault in faults)
    assert names(case.repair(against=case.source)) == ["pack-order"]
    assert verify(case.out, case.source).ok
    exported = json.loads((case.out / "config.json").read_text(encoding="utf-8"))[
        "quantization_config"
    ]["export"]
    assert exported["pack_method"] == "reorder"


def test_without_the_source_the_pack_order_is_not_proven(
    workshop: Workshop, tmp_path: Path
) -> None:
    plan = Case(workshop, mislabelled(QUARK_INT4), tmp_path).plan()
    assert names(plan) == []
    assert plan.notes == ("the pack order 'order' is not proven: give the BF16 draft (--against)",)


def test_a_right_pack_order_stays(workshop: Workshop, tmp_path: Path) -> None:
    right = general("right", QUARK_INT4_CHANNEL, lambda _folder: None, "eagle3-llama")
    plan = Case(workshop, right, tmp_path).plan(against=tmp_path / "source")
    assert names(plan) == []
    assert plan.notes == ()


def test_codes_of_neither_pack_order_are_an_error(workshop: Workshop, tmp_path: Path) -> None:
    case = Case(workshop, mislabelled(QUARK_INT4_CHANNEL), tmp_path)
    edit(case.folder, lambda t: t.__setitem__(f"{Q}.weight", flip_bit(t[f"{Q}.weight"], 3)))
    with pytest.raises(
        CheckpointError, match=r"under neither pack order.*as 'order'.*as 'reorder'"
    ):
        case.plan(against=case.source)


def test_where_both_pack_orders_are_right_nothing_changes(
    workshop: Workshop, tmp_path: Path
) -> None:
    """All weights are the same, so every nibble of a word is."""
    source = tiny_eagle3_llama(tmp_path / "draft")
    ones = {
        name: t._replace(data=np.full(t.shape, 0x3F80, np.uint16).tobytes())
        for name, t in read_tensors(source).items()
    }
    write_tensors(source, ones, metadata={"format": "pt"})
    workshop.quantize(source, format_recipe(*QUARK_INT4_CHANNEL), "ones")
    folder = workshop.out / "ones"
    edit_declaration(folder, lambda d: d["export"].update(pack_method="order"))
    plan = plan_repairs(folder, engine="vllm", against=source)
    assert names(plan) == []
    assert plan.notes == ()


# What is left


def test_a_method_is_not_inferred_from_tensors_of_another_shape(
    workshop: Workshop, tmp_path: Path
) -> None:
    def edit_both(folder: Any) -> None:
        del folder.quantization["quant_method"]
        folder.drop(f"{O_PROJ}.weight_scale")

    plan = Case(workshop, general("odd", CT_FP8, edit_both, "eagle3-llama"), tmp_path).plan()
    assert names(plan) == []
    assert plan.notes == ("quant_method is missing, and none fits keys and tensors",)


def test_a_folder_that_is_no_draft_is_left(workshop: Workshop, tmp_path: Path) -> None:
    def rename(folder: Any) -> None:
        folder.config["architectures"] = ["GPT2LMHeadModel"]

    plan = Case(workshop, general("target", CT_FP8, rename, "eagle3-llama"), tmp_path).plan()
    assert plan.repairs == ()
    assert "no supported draft family has 'GPT2LMHeadModel'" in plan.notes[0]


def test_a_method_that_only_engines_know_is_left(workshop: Workshop, tmp_path: Path) -> None:
    def gptq(folder: Any) -> None:
        folder.quantization["quant_method"] = "gptq"

    plan = Case(workshop, general("gptq", CT_FP8, gptq, "eagle3-llama"), tmp_path).plan()
    assert names(plan) == []
    assert "'gptq' is not understood here" in plan.notes[0]


def test_whole_names_need_the_number_of_target_layers(workshop: Workshop, tmp_path: Path) -> None:
    def keep_o_proj(folder: Any) -> None:
        folder.keep(O_PROJ)

    broken = general("o-proj", FP8, keep_o_proj, "eagle3-llama")
    case = Case(workshop, broken, tmp_path)
    plan = case.plan(target_layers=None)
    assert names(plan) == []
    assert "(give --target-layers)" in plan.notes[0]
    assert names(case.repair()) == ["excludes"]
    assert verdicts(case.out)[0] == "LOADS"


# Provenance


def test_a_folder_of_ours_keeps_its_provenance(workshop: Workshop, tmp_path: Path) -> None:
    case = Case(workshop, general("ours", QUARK_FP8, excludes("fc"), "eagle3-llama"), tmp_path)
    before = json.loads((case.folder / "draftquant.json").read_text(encoding="utf-8"))
    case.repair()
    after = json.loads((case.out / "draftquant.json").read_text(encoding="utf-8"))
    assert after.keys() - before.keys() == {"made_by", "repairs"}
    assert after["argv"] == ["fix"]
    assert after["made_by"] == {"draftquant": before["draftquant"], "argv": before["argv"]}
    assert after["repairs"][0]["name"] == "excludes"
    for key in before.keys() - {"argv", "draftquant", "sha256"}:
        assert after[key] == before[key]
    edit_declaration(case.out, lambda declared: declared.update(exclude=["fc"]))
    again = plan_repairs(case.out, engine="vllm")
    repair_draft(again, tmp_path / "again", source=DraftSource(folder=case.out), argv=["again"])
    last = json.loads((tmp_path / "again" / "draftquant.json").read_text(encoding="utf-8"))
    assert last["made_by"] == after["made_by"]
    assert len(last["repairs"]) == len(after["repairs"]) + 1
    assert verify(tmp_path / "again", case.source).ok


def test_a_folder_of_another_tool_gets_the_repairs_alone(
    workshop: Workshop, tmp_path: Path
) -> None:
    case = Case(workshop, general("theirs", QUARK_FP8, excludes("fc"), "eagle3-llama"), tmp_path)
    (case.folder / "draftquant.json").unlink()
    case.repair(against=case.source)
    record = json.loads((case.out / "draftquant.json").read_text(encoding="utf-8"))
    assert set(record) == {
        "format", "version", "draftquant", "argv", "source", "repairs", "tensor_digests",
        "sha256",
    }  # fmt: skip
    assert record["tensor_digests"].keys() == read_tensors(case.folder).keys()
    assert verify(case.out, case.source).ok
    (made_by, _) = audit(Checkpoint.open(case.out)).made_by
    assert made_by.startswith("something else, repaired by draftquant ")


@pytest.mark.parametrize("against", [False, True])
def test_a_plain_draft_gets_no_record_and_may_still_be_quantized(
    against: bool, tmp_path: Path
) -> None:
    draft = tiny_eagle3_llama(tmp_path / "draft")
    edit_json(draft / "config.json", torch_dtype="float32")
    original = tiny_eagle3_llama(tmp_path / "original") if against else None
    plan = plan_repairs(draft, engine="vllm", against=original)
    assert "dtype-mismatch" in [repair.name for repair in plan.repairs]
    report = repair_draft(plan, tmp_path / "plain", source=DraftSource(folder=draft))
    assert report.verification is None  # it has no codes
    assert {path.name for path in (tmp_path / "plain").iterdir()} == {
        path.name for path in draft.iterdir()
    }
    plain, out = str(tmp_path / "plain"), str(tmp_path / "out")
    assert main(["quantize", plain, "--recipe", "int4-channel", "--out", out]) == 0


def test_the_producer_stays(workshop: Workshop, tmp_path: Path) -> None:
    """What is repaired was still made by what made it."""

    def older(folder: Any) -> None:
        edit_json(
            folder.path / "hf_quant_config.json", producer={"name": "modelopt", "version": "0"}
        )
        folder.exclude(["model*"])

    case = Case(workshop, general("older", MODELOPT_FP8, older, "eagle3-llama"), tmp_path)
    assert names(case.repair()) == ["excludes", "side-file"]
    written = json.loads((case.out / "hf_quant_config.json").read_text(encoding="utf-8"))
    assert written["producer"] == {"name": "modelopt", "version": "0"}


def test_the_lints_of_the_source_are_repaired_in_the_copy(
    workshop: Workshop, tmp_path: Path
) -> None:
    """`verify` accepts config.json of a repaired folder as of one quantized with --fix-config."""
    case = Case(workshop, general("lints", CT_FP8, excludes("fc"), "eagle3-llama"), tmp_path)
    edit_json(case.source / "config.json", torch_dtype="float32")
    edit_json(case.folder / "config.json", torch_dtype="float32")
    plan = case.repair(against=case.source)
    assert "dtype-mismatch" in [repair.name for repair in plan.repairs]
    assert (
        json.loads((case.out / "config.json").read_text(encoding="utf-8"))["torch_dtype"]
        == "bfloat16"
    )
    assert verify(case.out, case.source).ok
    edit_json(case.out / "config.json", rms_norm_eps=1.0)
    assert not verify(case.out, case.source).ok


def test_shards_and_their_index(workshop: Workshop, tmp_path: Path) -> None:
    case = Case(workshop, general("shards", CT_FP8, excludes("fc"), "eagle3-llama"), tmp_path)
    (case.folder / "model.safetensors").rename(tmp_path / "whole")
    tensors = {**read_tensors(workshop.out / case.healthy.name)}
    write_tensors(case.folder, tensors, sharded=True, metadata={"format": "pt"})
    index = case.folder / "model.safetensors.index.json"
    edit_json(index, metadata={"total_size": 1, "by": "another tool"})
    assert names(case.repair()) == ["excludes", "index"]
    written = json.loads((case.out / index.name).read_text(encoding="utf-8"))
    size = sum(len(tensor.data) for tensor in tensors.values())
    assert written["metadata"] == {"total_size": size, "by": "another tool"}
    for file in case.folder.glob("*.safetensors"):
        assert (case.out / file.name).read_bytes() == file.read_bytes()


# Writing


def test_an_interrupted_run_publishes_nothing(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(workshop, general("stop", CT_FP8, excludes("fc"), "eagle3-llama"), tmp_path)

    def interrupted(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(repaired_copy, "verify", interrupted)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        case.repair(against=case.source)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_tensor_that_does_not_arrive_publishes_nothing(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(workshop, general("bits", CT_FP8, excludes("fc"), "eagle3-llama"), tmp_path)
    copy = shutil.copyfile

    def damaged(source: Path, target: Path) -> None:
        copy(source, target)
        if target.suffix == ".safetensors":
            with target.open("r+b") as stream:
                stream.seek(-1, os.SEEK_END)
                last = stream.read(1)[0]
                stream.seek(-1, os.SEEK_END)
                stream.write(bytes([last ^ 1]))

    monkeypatch.setattr(shutil, "copyfile", damaged)
    with pytest.raises(VerifyError, match="did not arrive as it was"):
        case.repair()
    assert not case.out.exists()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda t: t.__setitem__("norm.weight", flip_bit(t["norm.weight"], 0)), "other values"),
        (lambda t: t.pop("t2d"), "another draft than .*: t2d"),
    ],
)
def test_against_another_draft(
    workshop: Workshop, tmp_path: Path, change: Callable[[dict[str, Stored]], Any], what: str
) -> None:
    case = Case(workshop, general("other", CT_FP8, excludes("fc"), "eagle3-llama"), tmp_path)
    edit(case.source, change)
    read_draft(Checkpoint.open(case.source))  # a draft, but not this one
    with pytest.raises(CheckpointError, match=what):
        case.plan(against=case.source)


def test_nothing_is_overwritten(workshop: Workshop, tmp_path: Path) -> None:
    case = Case(workshop, general("twice", CT_FP8, excludes("fc"), "eagle3-llama"), tmp_path)
    case.repair()
    before = content(case.out)
    with pytest.raises(OutputError, match="already exists"):
        case.repair()
    assert content(case.out) == before


# The command


@pytest.fixture
def bare(workshop: Workshop, tmp_path: Path) -> Case:
    return Case(workshop, general("bare", CT_FP8, excludes("fc"), "eagle3-llama"), tmp_path)


def fix(case: Case, *more: str, folder: Path | None = None) -> int:
    draft = str(folder or case.folder)
    return main(["check", draft, "--engine", "vllm", "--arch", "sm90", "--fix", *more])


def test_the_command(bare: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert fix(bare, "--out", str(bare.out), "--against", str(bare.source)) == 0
    printed = capsys.readouterr().out
    assert "before LOADS BUT WRONG, after LOADS" in printed
    assert "GOOD" in printed
    assert "vLLM takes model.fc as quantized" in printed
    assert fix(bare, "--out", str(bare.out) + "-2", folder=bare.out) == 0
    assert "config.json needs no repair: no folder was written" in capsys.readouterr().out
    assert not Path(f"{bare.out}-2").exists()


def test_the_command_in_json(bare: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert fix(bare, "--out", str(bare.out), "--against", str(bare.source), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["before"]["verdict"], found["after"]["verdict"]) == ("LOADS BUT WRONG", "LOADS")
    assert found["repairs"][0]["name"] == "excludes"
    assert found["verification"]["ok"]
    assert found["verification"]["output"] == found["out"] == str(bare.out)


def test_what_cannot_be_repaired_keeps_its_verdict(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def drop(folder: Any) -> None:
        folder.drop(f"{O_PROJ}.weight_scale")

    case = Case(workshop, general("scale", CT_FP8, drop, "eagle3-llama"), tmp_path)
    assert fix(case, "--out", str(case.out), "--against", str(case.source)) == 1
    printed = capsys.readouterr().out
    assert "before LOADS BUT WRONG, after LOADS BUT WRONG" in printed
    assert f"{O_PROJ}.weight_scale: expected" in printed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--fix"], "add --out FOLDER"),
        (["--out", "o"], "add --fix"),
        (["--against", "b"], "add --fix"),
        (["--fix", "--out", "DRAFT"], "is never overwritten"),
        (["--fix", "--out", "DRAFT/o"], "overlaps the source"),
        (["--fix", "--out", "o", "--against", "OTHER"], "is another draft than"),
        (["--fix", "--out", "o", "--against", "DRAFT"], "give the floating-point"),
    ],
)
def test_bad_input(
    bare: Case,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    message: str,
) -> None:
    work = bare.folder.parent
    monkeypatch.chdir(work)
    other = tiny_eagle3_llama(work / "other")
    names_of = {"DRAFT": str(bare.folder), "OTHER": str(other)}
    given = [names_of.get(a, a.replace("DRAFT/", f"{bare.folder}/")) for a in more]
    before = sorted(path.name for path in work.iterdir())
    assert main(["check", str(bare.folder), "--engine", "vllm", *given]) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in work.iterdir()) == before


def one_code_off(folder: Path) -> None:
    """The first code of down_proj becomes another one."""
    tensors = read_tensors(folder)
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    codes = bytes([tensors[name].data[0] ^ 0x40]) + tensors[name].data[1:]
    tensors[name] = tensors[name]._replace(data=codes)
    write_tensors(folder, tensors, metadata={"format": "pt"})


def test_the_verdict_of_verify_is_printed_and_decides(
    bare: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    one_code_off(bare.folder)
    assert fix(bare, "--out", str(bare.out)) == 0  # nobody knows
    capsys.readouterr()
    out, against = f"{bare.out}-2", ["--against", str(bare.source)]
    assert fix(bare, "--out", out, *against) == 1
    printed = capsys.readouterr().out
    assert re.search(r"WRONG: \d+ fault", printed)
    assert "down_proj.weight" in printed
    assert "after LOADS" in printed
    assert fix(bare, "--out", f"{bare.out}-3", *against, folder=Path(out)) == 1
    printed = capsys.readouterr().out
    assert "no folder was written" in printed
    assert re.search(r"WRONG: \d+ fault", printed)
    assert fix(bare, "--out", f"{bare.out}-3", *against, "--json", folder=Path(out)) == 1
    assert json.loads(capsys.readouterr().out)["verification"]["ok"] is False


def test_what_verify_does_not_understand_is_wrong(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(workshop, general("gptq", CT_FP8, declare("quant_method", "gptq"), "eagle3-llama"),
                tmp_path)  # fmt: skip
    edit_json(case.folder / "config.json", dtype="bfloat16",
              eagle_aux_hidden_state_layer_ids=[2, 4, 5])  # fmt: skip
    assert fix(case, "--out", str(case.out), "--against", str(case.source)) == 1
    assert re.search(r"WRONG: \d+ fault", capsys.readouterr().out)


def test_no_torch_is_imported(bare: Case) -> None:
    command = ["check", str(bare.folder), "--engine", "vllm", "--fix", "--out", str(bare.out),
               "--against", str(bare.source)]  # fmt: skip
    code = (
        "import sys; from draftquant.scripts.cli import main\n"
        f"assert main({command!r}) in (0, 1, 3); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert bare.out.is_dir()


def test_kept_linears_are_excluded_by_the_names_engines_give_them(
    workshop: Workshop, tmp_path: Path
) -> None:
    edit_o = kept(O_PROJ, exclude=["layers.0.self_attn.o_proj"])
    case = Case(workshop, general("kept", QUARK_FP8, edit_o, "eagle3-llama"), tmp_path)
    plan = case.repair()
    declared = json.loads((case.out / "config.json").read_text(encoding="utf-8"))[
        "quantization_config"
    ]
    assert "re:.*o_proj$" in declared["exclude"]
    assert plan.repairs[0].wrong.startswith(
        "vLLM takes model.layers.0.self_attn.o_proj as quantized"
    )
