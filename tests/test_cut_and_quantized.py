"""A vocabulary cut before or after quantizing: equal bytes, and whole records in both orders."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuts import CHOICE, IDS, cut, target
from draftquant.calibration.traces.held_out import seen_prompts
from draftquant.calibration.vocabulary.cut_plan import cut_config
from draftquant.calibration.vocabulary.cut_vocabulary import cut_vocabulary
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.digests import tensor_digests
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.files.provenance_file import (
    cuts_of,
    quantization_of,
    read_provenance,
    sources_of,
)
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.verify import verify
from draftquant.recipes import Recipe, Rule, load_recipe
from draftquant.recipes.errors import CheckpointError, GateError, LayoutError
from draftquant.scripts.cli import main
from draftquant.validate.judging.advice import Background, lose_less
from draftquant.validate.judging.candidate_origin import DraftFolder, check_folders, check_loaded
from draftquant.validate.report.facts import folder_facts
from test_held_out import TRACES, folder_of
from tiny import tiny_eagle3_llama
from tiny_dflash import tiny_dflash
from tiny_dspark import tiny_dspark
from verify_cases import Tensors, edit, faults_of, flip_bit, quantized_folder, reseal

pytestmark = pytest.mark.usefixtures("one_thread")


def with_head(recipe: Recipe) -> Recipe:
    """The same, with the head quantized as the layers are."""
    rules = (
        Rule(role=rule.role, action="quantize") if "head" in rule.role else rule
        for rule in recipe.rules
    )
    return replace(recipe, rules=tuple(rules))


def same_folders(a: Path, b: Path) -> None:
    """Every tensor and every document, but for the records and what people read."""
    files = sorted(p.name for p in a.iterdir())
    assert files == sorted(p.name for p in b.iterdir())
    for name in files:
        if name not in ("draftquant.json", "README.md"):
            assert (a / name).read_bytes() == (b / name).read_bytes(), name


RECIPES: dict[str, Recipe] = {
    "int4 per group, head kept": load_recipe("int4-group128"),
    "fp8 per channel, head too": with_head(load_recipe("fp8-ptpc")),
}
DRAFTS: dict[str, Callable[[Path], Path]] = {
    "eagle3": lambda folder: tiny_eagle3_llama(
        folder, hidden=128, intermediate=128, head_dim=32, sharded=True
    ),
    "dspark": lambda folder: tiny_dspark(folder, hidden=128, head=True, intermediate=128),
}


@pytest.mark.some(1)
@pytest.mark.parametrize(("draft", "name"), list(zip(("dspark", "eagle3"), RECIPES, strict=True)))
def test_either_order_gives_equal_bytes_and_records(draft: str, name: str, tmp_path: Path) -> None:
    source, recipe = DRAFTS[draft](tmp_path / "draft"), RECIPES[name]
    cut(source, tmp_path / "cut")
    cut_first = quantized_folder(tmp_path / "cut", tmp_path / "cut-quantized", recipe)
    quantized_folder(source, tmp_path / "quantized", recipe)
    cut_last = tmp_path / "quantized-cut"
    cut(tmp_path / "quantized", cut_last)
    same_folders(cut_first, cut_last)
    for out, before in ((cut_first, "cut"), (cut_last, "quantized")):
        for against in (tmp_path / before, source):
            report = verify(out, against)
            assert report.ok, report.faults
        record = read_provenance(out)
        assert [str(each) for each in cuts_of(record)] == ["vocabulary 20 of 96"]
        found = quantization_of(record)
        assert found is not None
        assert found.recipe == recipe
        assert tensor_digests(Checkpoint.open(source)) in list(sources_of(record))
    (tmp_path / "quantized" / "draftquant.json").unlink()
    layout = "quark" if draft == "dspark" else "modelopt"  # quark stores no quantized head
    other = ["transcode", str(tmp_path / "quantized"), "--layout", layout]
    assert main([*other, "--out", str(tmp_path / "other"), "--quiet"]) == 0
    cut(tmp_path / "other", tmp_path / "other-cut")
    with pytest.raises(CheckpointError, match="after another tool had quantized it"):
        verify(tmp_path / "other-cut", source)


FP8 = with_head(load_recipe("fp8-ptpc"))
SHARED: dict[str, Recipe] = {
    "one scale": replace(FP8, weights=replace(FP8.weights, granularity="tensor")),
    "a scale over those of groups": with_head(load_recipe("nvfp4-weights")),
}


@pytest.mark.parametrize("name", SHARED)
def test_rows_that_share_their_scales_are_cut_first(name: str, tmp_path: Path) -> None:
    sizes = {"hidden": 128, "intermediate": 128, "head_dim": 32, "vocab": 128}
    source = tiny_eagle3_llama(tmp_path / "draft", **sizes)
    quantized = quantized_folder(source, tmp_path / "quantized", SHARED[name])
    with pytest.raises(LayoutError):
        cut(quantized, tmp_path / "cut")


def test_rows_of_the_targets_head_in_either_order(tmp_path: Path) -> None:
    source, model = tiny_dflash(tmp_path / "draft"), target(tmp_path / "target")
    cut(source, tmp_path / "cut", target=model)
    cut_first = quantized_folder(tmp_path / "cut", tmp_path / "a", load_recipe("fp8-ptpc"))
    edit(tmp_path / "cut", lambda t: t.update({"norm.weight": flip_bit(t["norm.weight"], 3)}))
    with pytest.raises(CheckpointError, match=r"norm\.weight: not the bytes whose digest"):
        quantized_folder(tmp_path / "cut", tmp_path / "out", load_recipe("fp8-ptpc"))
    quantized = quantized_folder(source, tmp_path / "quantized", load_recipe("fp8-ptpc"))
    cut(quantized, tmp_path / "b", target=model)
    same_folders(cut_first, tmp_path / "b")
    assert verify(tmp_path / "b", quantized).ok
    for out in (cut_first, tmp_path / "b"):
        assert verify(out, source, target=model).ok
        with pytest.raises(CheckpointError, match="the rows are its target's"):
            verify(out, source)


def test_the_size_stands_behind_the_vocabulary_wherever_it_stood() -> None:
    """A fix of config.json may have put it last, before the draft was cut or after."""
    key = "draft_vocab_size"
    for config in ({key: 96, "vocab_size": 96, "a": 1}, {"vocab_size": 96, "a": 1, key: 96}):
        assert list(cut_config(config, 20)) == ["vocab_size", key, "a"]
    layered = {"transformer_layer_config": {"vocab_size": 96}, "quantization_config": {}}
    assert list(cut_config(layered, 20))[1:] == [key, "quantization_config"]


# ---- `verify` of a cut vocabulary against those who change a folder and its record alike


HEAD, SECOND = "lm_head.weight", "markov_head.markov_w2.weight"


def edit_record(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """And give it its seal."""
    content = json.loads((folder / "draftquant.json").read_text(encoding="utf-8"))
    change(content)
    (folder / "draftquant.json").write_text(json.dumps(content), encoding="utf-8")
    reseal(folder)


def digested(folder: Path) -> None:
    """The record names the tensors that are there."""
    edit_record(folder, lambda d: d.update(tensor_digests=tensor_digests(Checkpoint.open(folder))))


def swapped(tensors: Tensors, name: str) -> None:
    """Rows 4 and 7."""
    tensor = tensors[name]
    width = len(tensor.data) // tensor.shape[0]
    rows = [tensor.data[i : i + width] for i in range(0, len(tensor.data), width)]
    rows[4], rows[7] = rows[7], rows[4]
    tensors[name] = tensor._replace(data=b"".join(rows))


def moved(tensors: Tensors) -> None:
    """A row is said to be of the next token, in both maps."""
    offsets, mask = np.frombuffer(tensors["d2t"].data, "<i8").copy(), bytearray(tensors["t2d"].data)
    offsets[5] += 1
    for token in (IDS[5], IDS[5] + 1):
        mask[token] ^= 1
    tensors["d2t"] = tensors["d2t"]._replace(data=offsets.tobytes())
    tensors["t2d"] = tensors["t2d"]._replace(data=bytes(mask))


ATTACKS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "token off by one in both maps": (moved, HEAD),
    "second table cut otherwise": (lambda t: swapped(t, SECOND), SECOND),
    "no mask": (lambda t: t.pop("t2d"), "t2d"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A DSpark draft, which has two tables with a row for each token, and its cut."""
    root = tmp_path_factory.mktemp("attacks")
    source = tiny_dspark(root / "draft", head=True)
    cut(source, root / "cut")
    return source, root / "cut"


@pytest.mark.parametrize("name", ATTACKS)
def test_a_wrong_byte_is_found(name: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    source, good = folders
    change, where = ATTACKS[name]
    out = Path(shutil.copytree(good, tmp_path / "out"))
    edit(out, change)
    digested(out)
    assert where in [fault.where for fault in verify(out, source).faults]


RECORDS: dict[str, Callable[[Any], Any]] = {
    "convention": lambda d: d["cuts"][0].update(convention="ids"),
    "lent head": lambda d: d["cuts"][0].update(head_from={"tensor": HEAD, "digest": "0"}),
    "source": lambda d: d["cuts"][0]["source"]["tensor_digests"].update({HEAD: "blake3:0"}),
    "an earlier cut": lambda d: d["cuts"].insert(0, d["cuts"][0]),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_a_wrong_record_is_found(name: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    source, good = folders
    out = Path(shutil.copytree(good, tmp_path / "out"))
    edit_record(out, RECORDS[name])
    assert not verify(out, source).ok


def test_rows_and_record_of_a_quantized_head_are_held_against_both(tmp_path: Path) -> None:
    """The record of the quantized folder, which says who calibrated it, is carried on."""
    source = tiny_eagle3_llama(tmp_path / "draft")
    quantized, out = quantized_folder(source, tmp_path / "fp8", "fp8-ptpc"), tmp_path / "cut"
    cut(quantized, out)
    edit(out, lambda tensors: swapped(tensors, HEAD))
    digested(out)
    assert "bytes of target id 15, got others in row 4" in faults_of(verify(out, quantized))
    assert "lm_head.weight: expected the source's bytes" in faults_of(verify(out, source))
    edit_record(out, lambda d: d["quantized_by"].update(backend_versions={}))
    assert "quantized_by: expected the source's record" in faults_of(verify(out, quantized))
    assert "quantized_by.sha256" in faults_of(verify(out, source))


# ---- the gate and cut vocabularies: what ties a draft to the whole one, and who is held out


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two drafts; the first one cut, quantized, and both in either order; the traces that chose."""
    folder = tmp_path_factory.mktemp("gate")
    tiny_eagle3_llama(folder / "draft")
    tiny_eagle3_llama(folder / "other", seed=7)
    seen = seen_prompts(folder_of(TRACES[:2], folder / "traces"))
    choice = replace(CHOICE, calibration_prompts=seen.sha256, calibration_sketches=seen.sketches)
    for source, out in (("draft", "cut"), ("cut", "cut-fp8"), ("draft", "fp8"), ("fp8", "fp8-cut")):
        hub_id = "someone/draft" if source == "draft" else None
        origin = DraftSource(folder=folder / source, hub_id=hub_id)
        if out.endswith("cut"):
            cut_vocabulary(origin, folder / out, target_ids=IDS, choice=choice)
        else:
            draft = read_draft(Checkpoint.open(folder / source))
            quantize_draft(make_plan(load_recipe("fp8-ptpc"), draft), folder / out, source=origin)
    return folder


CANDIDATES = ("cut", "cut-fp8", "fp8-cut")


def check(work: Path, baseline: str, candidate: str) -> tuple[str, ...]:
    folders = [DraftFolder.read(work / name) for name in (baseline, candidate)]
    warnings = check_folders(*folders, unrelated=False)
    loaded = [load_draft(work / name) for name in (baseline, candidate)]
    return warnings + check_loaded(*loaded, folders[1])


def test_what_is_said_of_cuts(work: Path) -> None:
    """A baseline that is cut itself is named; a cut draft loses less with more rows."""
    (warning,) = check(work, "cut", "cut-fp8")
    assert "the baseline has a cut vocabulary itself (vocabulary 20 of 96)" in warning
    (alone,) = lose_less(Background(cut=True, quantized=False))
    assert "draftquant vocab BF16" in alone
    assert alone in lose_less(Background(cut=True, recipes_to_try=("fp8-ptpc",)))
    assert alone not in lose_less(Background())


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_records_lead_back_to_the_whole_draft(work: Path, candidate: str) -> None:
    assert check(work, "draft", candidate) == ()
    with pytest.raises(GateError, match=r"was not quantized from .*other: "):
        check(work, "other", candidate)
    facts = folder_facts(candidate, DraftFolder.read(work / candidate))
    assert facts.vocabulary == "vocabulary 20 of 96"
    if facts.quantized is not None:
        assert (facts.quantized.num_quantized, facts.quantized.recipe) == (7, "fp8-ptpc")


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_prompts_that_chose_the_rows_judge_nothing(work: Path, candidate: str) -> None:
    arguments = ["gate", str(work / "draft"), str(work / candidate), "--traces"]
    assert main([*arguments, str(work / "traces")]) == 2
