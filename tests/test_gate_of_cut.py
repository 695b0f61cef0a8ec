"""The gate and cut vocabularies: what ties a draft to the whole one, and who is held out."""

import dataclasses
from pathlib import Path

import pytest
from cuts import CHOICE, IDS
from draftquant.calibration.traces.near_duplicates import seen_prompts
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.vocabulary.cut_vocabulary import cut_vocabulary
from draftquant.recipes import load_recipe
from draftquant.recipes.errors import GateError
from draftquant.scripts.cli import main
from draftquant.validate.judging.advice import Background, lose_less
from draftquant.validate.judging.candidate_origin import DraftFolder, check_folders, check_loaded
from draftquant.validate.report.facts import folder_facts
from test_held_out import TRACES, folder_of
from tiny import tiny_eagle3_llama

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two drafts; the first one cut, quantized, and both in either order; the traces that chose."""
    folder = tmp_path_factory.mktemp("gate")
    tiny_eagle3_llama(folder / "draft")
    tiny_eagle3_llama(folder / "other", seed=7)
    seen = seen_prompts(folder_of(TRACES[:2], folder / "traces"))
    choice = dataclasses.replace(
        CHOICE, calibration_prompts=seen.sha256, calibration_sketches=seen.sketches
    )
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
    warnings = check_folders(*folders)
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
def test_prompts_that_chose_the_rows_judge_nothing(
    work: Path, candidate: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["gate", str(work / "draft"), str(work / candidate), "--traces"]
    assert main([*arguments, str(work / "traces")]) == 2
    assert "2 of its 2 prompts were used to choose the rows of the candidate's head (vocab)" in (
        " ".join(capsys.readouterr().err.split())
    )
