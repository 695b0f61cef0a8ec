"""Measurements and parity beside named drafts: what was measured has to be of these."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from by_recipe import quantized
from draftquant.api import gate
from draftquant.calibration.traces.prompt_trace import prompt_sha256
from draftquant.recipes.errors import GateError
from draftquant.validate.parity.finding import ParityFinding, write_findings
from draftquant.validate.report.document import read_report
from draftquant.validate.runs.report_pages import draft_identity
from handmade_measurements import losing, written
from said_traces import write_said
from test_foreign_measurements import REAL, both
from tiny import edit_json, tiny_eagle3_llama
from verify_cases import reseal

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::draftquant.api.DraftQuantWarning"),
]
FOUND = ParityFinding(check="task", what="gsm8k", estimate=0.0, threshold=-0.02, verdict="PASS",
                reason="Nothing was lost.")  # fmt: skip


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two drafts and the first one in FP8."""
    folder = tmp_path_factory.mktemp("named")
    tiny_eagle3_llama(folder / "bf16")
    tiny_eagle3_llama(folder / "other", seed=7)
    quantized(folder / "bf16", "fp8-ptpc", folder / "fp8")
    return folder


@pytest.fixture(scope="module")
def hashes(work: Path) -> Mapping[str, str]:
    return {name: draft_identity(work / name).draft_sha256 for name in ("bf16", "other", "fp8")}


def run(path: Path, drop: int, draft_sha256: str | None) -> Path:
    return written(path, losing(drop, name="run", draft_sha256=draft_sha256))


@pytest.fixture
def runs(hashes: Mapping[str, str], tmp_path: Path) -> list[Path]:
    """Of the two drafts."""
    return [run(tmp_path / "a", 0, hashes["bf16"]), run(tmp_path / "b", 1, hashes["fp8"])]


def judged(work: Path, runs: list[Path], *options: Path, **more: Any) -> Any:
    return gate(work / "bf16", work / "fp8", measured=runs, parity=options, **more)


def test_measurements_of_these_drafts_pass_and_of_others_decide_nothing(
    work: Path, hashes: Mapping[str, str], runs: list[Path], tmp_path: Path
) -> None:
    report = judged(work, runs, report=tmp_path / "r.json")
    assert (report.verdict, report.background.candidate_sha256) == ("PASS", hashes["fp8"])
    assert '"family": "eagle3-llama"' in (tmp_path / "r.json").read_text(encoding="utf-8")
    other = run(tmp_path / "other", 0, hashes["other"])
    for wrong in ([other, runs[1]], [runs[0], other], runs[::-1]):
        with pytest.raises(GateError):
            judged(work, wrong)
    with pytest.raises(GateError):
        gate(work / "other", work / "fp8", measured=[other, runs[1]])
    with pytest.raises(GateError):
        gate(work / "bf16", measured=runs)


@pytest.mark.parametrize("unsaid", [0, 1])
def test_nameless_measurements_release_no_draft(unsaid: int, work: Path, runs: list[Path]) -> None:
    run(runs[unsaid], unsaid, None)
    report = judged(work, runs)
    assert (report.verdict, report.exit_code) == ("INCONCLUSIVE", 3)
    assert gate(measured=runs).verdict == "PASS"  # of two servers, and of no draft by its name


def test_another_tools_files_release_no_draft_by_its_name(work: Path) -> None:
    report = judged(work, both(REAL["guidellm"]), min_prompts=2)
    assert report.verdict != "PASS"
    assert gate(measured=both(REAL["guidellm"]), min_prompts=2).background.not_compared == ()
    assert "ran the draft that is named" in "".join(report.background.not_compared)


def test_parity_says_whose_it_is_and_of_other_drafts_is_refused(
    work: Path, hashes: Mapping[str, str], runs: list[Path], tmp_path: Path
) -> None:
    told, parity = tmp_path / "told.json", tmp_path / "parity.json"
    for own in (("other",), (None, "other")):
        named = [name and hashes[name] for name in own]
        write_findings(parity, [FOUND], overwrite=True, drafts_sha256=named)
        with pytest.raises(GateError, match=hashes["other"][:12]):
            judged(work, runs, parity)
        with pytest.raises(GateError):
            gate(measured=runs, parity=[parity])
    write_findings(told, [FOUND], drafts_sha256=[hashes["bf16"], hashes["fp8"]])
    warning = "nothing shows that the findings of parity.json are about the drafts"
    for named in ([], [None, None], [hashes["bf16"], None], [None, hashes["fp8"]]):
        write_findings(parity, [FOUND], overwrite=True, drafts_sha256=named)
        found = judged(work, runs, told, parity)
        assert (found.verdict, sum(warning in one for one in found.warnings)) == ("PASS", 1), named


def test_named_drafts_are_known_by_folders(work: Path, runs: list[Path], tmp_path: Path) -> None:
    """No record, calibration on these prompts: as where traces are given."""
    assert judged(work, runs, expect_baseline=1.6).background.expected_baseline == 1.6
    own = Path(shutil.copytree(work / "fp8", tmp_path / "fp8"))
    edit_json(own / "draftquant.json", calibration_prompts=[prompt_sha256([3])])
    reseal(own)
    with pytest.raises(GateError):
        gate(work / "bf16", own, measured=runs)
    (own / "draftquant.json").unlink()
    assert gate(work / "bf16", own, measured=runs).verdict == "ANOMALOUS"
    assert gate(work / "bf16", own, measured=runs, unrecorded=True).verdict == "PASS"


ANSWER = "vLLM 0.31.0 in .venv on the CPU loaded this draft, and <not> all of it arrived"


@pytest.mark.parametrize("replayed", [False, True])
def test_an_engine_that_was_asked_has_a_line_in_every_report(
    replayed: bool, work: Path, hashes: Mapping[str, str], runs: list[Path], tmp_path: Path
) -> None:
    answer = {"verdict": "LOADS BUT WRONG", "sentence": ANSWER, "draft_sha256": hashes["fp8"]}
    asked = tmp_path / "asked.json"
    asked.write_text(json.dumps(answer), encoding="utf-8")
    files = {end: tmp_path / f"r.{end}" for end in ("json", "md", "html")}
    given: dict[str, Any] = {"measured": runs}
    if replayed:
        write_said(tmp_path / "traces", tokens=24)
        given = {"traces": tmp_path / "traces", "min_prompts": 2}
    pages = {"report": files["json"], "markdown": files["md"], "html": files["html"]}
    gate(work / "bf16", work / "fp8", asked=asked, **given, **pages)
    for end, file in files.items():
        text = file.read_text(encoding="utf-8")
        assert text.count("all of it arrived") == 1
        assert ("<not>" in text) is (end == "json")
    assert read_report(files["json"]).header.asked == f"LOADS BUT WRONG: {ANSWER}"


def test_an_answer_that_is_none_or_about_another_draft(
    work: Path, hashes: Mapping[str, str], runs: list[Path], tmp_path: Path
) -> None:
    answer = {"verdict": "LOADS", "sentence": ANSWER, "draft_sha256": hashes["fp8"]}
    asked = tmp_path / "asked.json"
    keys = "expected verdict, sentence and draft_sha256"
    contents: tuple[tuple[Any, str], ...] = (
        ([], ""), (answer | {"draft_sha256": None}, keys), (answer | {"verdict": "PASS"}, keys),
        (answer | {"draft_sha256": "0" * 64}, ""),
    )  # fmt: skip
    for content, said in contents:
        asked.write_text(json.dumps(content), encoding="utf-8")
        with pytest.raises(GateError, match=said):
            judged(work, runs, asked=asked)
    with pytest.raises(GateError):  # there is no QUANT that it is about
        gate(measured=runs, asked=asked)
