"""Replays of drafts whose keys and values are kept in FP8: `--kv-cache-dtype`."""

import json
from pathlib import Path

import pytest
from draftquant.calibration.measured_cache import measure_cache_scales
from draftquant.calibration.passes.draft_inputs import DraftRun, batches_of
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.drafts.draft_cache import UNIT, CacheScales, scale_origin
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.scripts.cli import main
from draftquant.validate.counting.replay_cache import Question
from draftquant.validate.judging.candidate_origin import DraftFolder
from draftquant.validate.report.facts import folder_facts
from tied_pair import tied

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder() -> Path:
    return tied()


def test_what_is_replayed_and_judged_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft, fp8 = str(folder / "draft"), ("--kv-cache-dtype", "fp8_e4m3")
    given = ["--traces", str(folder / "traces"), "-k", "2", "--json", "-q"]
    assert main(["replay", draft, draft, *given, *fp8]) == 0
    plain, served = json.loads(capsys.readouterr().out)
    assert (plain["name"], plain["kv_cache"], plain["cache_scales"]) == ("draft", None, None)
    assert served["name"] == "draft, KV cache fp8_e4m3"
    assert (served["kv_cache"], served["cache_scales"]) == ("fp8_e4m3", "unit")
    assert main(["replay", draft, *given, *fp8]) == 0
    (alone,) = json.loads(capsys.readouterr().out)
    assert alone["prompts"] == served["prompts"]
    assert main(["replay", draft, *given, "--kv-cache-dtype", "auto"]) == 0
    (unrounded,) = json.loads(capsys.readouterr().out)
    assert unrounded["prompts"] == plain["prompts"]

    assert main(["gate", draft, draft, *given, *fp8]) == 3  # three prompts decide nothing
    report = json.loads(capsys.readouterr().out)
    assert report["candidate"]["name"] == "draft, KV cache fp8_e4m3"
    assert report["drafts"]["candidate"]["quantization"] == "none, KV cache fp8_e4m3"
    assert report["drafts"]["candidate"]["kv_cache"] == "fp8_e4m3, unit scales"
    assert report["drafts"]["baseline"]["quantization"] == "none"
    assert report["drafts"]["baseline"]["kv_cache"] is None
    assert any('"kv_cache_dtype": "fp8_e4m3"' in one for one in report["warnings"])
    assert main(["gate", draft, draft, *given]) == 2  # a draft and itself


def test_what_is_kept_of_one_cache_is_not_taken_for_another(folder: Path) -> None:
    traces = TraceFolder.open(folder / "traces")

    def key(draft: LoadedDraft) -> object:
        batches = batches_of(traces.manifest.prompts)
        asked = Question(
            draft=draft, traces=traces, batches=batches, num_draft_tokens=2, temperature=None
        )
        return asked.key["draft"]

    plain = load_draft(folder / "draft")
    served = load_draft(folder / "draft", kv_cache="fp8_e4m3")
    other = plain.with_cache({0: CacheScales(k=(0.5,), v=(1.0,))})
    assert served.cache_scales == {0: UNIT}
    assert len({str(key(draft)) for draft in (plain, served, other)}) == 3
    assert key(load_draft(folder / "draft")) == key(plain)
    origins = [scale_origin(draft.cache_scales) for draft in (plain, served, other)]
    assert origins == [None, "unit", "stored"]


def test_what_a_folder_declares_is_replayed_unless_told_otherwise(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft, traces, out = folder / "draft", folder / "traces", tmp_path / "out"
    given = ("--recipe", "fp8-ptpc", "--kv-cache", "absmax", "--traces", str(traces), "-q")
    assert main(["quantize", str(draft), *given, "--out", str(out)]) == 0
    plain = load_draft(draft)
    (expected,) = measure_cache_scales(
        DraftRun(plain, TraceFolder.open(traces), 3), how="absmax"
    ).values()
    found = load_draft(out)
    assert found.cache_scales == {0: expected}
    assert found.name == "out"
    capsys.readouterr()
    assert main(["replay", str(out), "--traces", str(traces), "--json", "-q"]) == 0
    (replayed,) = json.loads(capsys.readouterr().out)
    assert (replayed["kv_cache"], replayed["cache_scales"]) == ("fp8_e4m3", "stored")
    facts = folder_facts(str(out), DraftFolder.read(out))
    assert facts.kv_cache == "fp8_e4m3, stored scales"
