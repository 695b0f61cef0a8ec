"""The gate's report as JSON: every kind is read as it was written, and nothing else is."""

import dataclasses
import json
import re
import time
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from draftquant.recipes.errors import GateError
from draftquant.validate.comparison.sources import ReplayedDraft, ReplayedPrompt
from draftquant.validate.judging.judgement import GateReport, judge
from draftquant.validate.parity.finding import to_mapping
from draftquant.validate.report import document as document_module
from draftquant.validate.report.document import (
    SCHEMA_VERSION,
    Header,
    Judgement,
    document_text,
    parse_report,
    read_report,
)
from draftquant.validate.served.joint_report import JointReport
from handmade_replays import BASELINE, FIGURES, RELEASE, noisy, replay, spread
from handmade_reports import (
    DRAFTS,
    ENGINES,
    HASHES,
    comparison,
    document,
    joint,
    mapping_of,
    served,
    text_of,
)

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("verdict", ["PASS", "FAIL", "INCONCLUSIVE", "ANOMALOUS"])
def test_a_comparison_is_read_as_it_was_written(verdict: str) -> None:
    judged = comparison(verdict)
    read = document(judged)
    assert isinstance(read.judgement, GateReport)
    assert read.judgement.verdict == verdict
    assert read.header.drafts == DRAFTS
    assert read.header.engines == ENGINES
    ((title, found),) = read.comparisons
    assert (title, found) == ("", read.judgement)
    assert found.change == judged.change  # type: ignore[attr-defined]
    assert found.baseline == judged.baseline  # type: ignore[attr-defined]
    assert found.prompts == judged.prompts  # type: ignore[attr-defined]
    assert len(found.prompts) == 40
    written = {"kind": "comparison"} | dataclasses.asdict(found)
    rest = {k: v for k, v in mapping_of(judged).items() if k not in dataclasses.asdict(read.header)}
    assert json.loads(json.dumps(written)) == json.loads(json.dumps(rest))


def test_a_joint_report_has_all_that_was_judged() -> None:
    read = document(joint())
    assert isinstance(read.judgement, JointReport)
    assert [title for title, _ in read.comparisons] == ["Replayed", "Served"]
    assert read.noise is not None
    assert [one.what for one in read.findings] == ["gsm8k exact_match"]
    (_, of_server) = read.comparisons[1]
    assert of_server.served is not None
    assert of_server.served.concurrency == (1, 1)


def test_measurements_alone_are_a_comparison() -> None:
    read = document(served())
    assert isinstance(read.judgement, GateReport)
    assert read.judgement.traces is None


def test_equal_judgements_are_equal_files(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text_of(comparison()), encoding="utf-8")
    assert text_of(comparison()) == (tmp_path / "report.json").read_text(encoding="utf-8")
    assert read_report(tmp_path / "report.json") == document(comparison())


# ---- what is no report


def said(text: str) -> str:
    with pytest.raises(GateError) as caught:
        parse_report(text, "r.json")
    return str(caught.value)


def test_a_report_of_before_versions() -> None:
    judged: Any = comparison()
    text = said(document_text(judged.to_mapping()))
    assert "was written by a draftquant before 0.2: expected schema_version 2, got none" in text
    assert "fix: run the gate again with --report" in text


def test_a_report_of_a_later_version() -> None:
    later = mapping_of(comparison()) | {"schema_version": SCHEMA_VERSION + 1}
    text = said(document_text(later))
    assert "was written by a newer draftquant: expected schema_version 2, got 3" in text
    assert "fix: install a newer draftquant" in text


def test_a_report_that_was_judged_by_other_rules() -> None:
    text = said(document_text(mapping_of(comparison()) | {"schema_version": 1}))
    assert "whose gate judged by other rules: expected schema_version 2, got 1" in text


def test_a_report_of_parity_belongs_elsewhere() -> None:
    findings = document(joint()).findings
    text = said(json.dumps(to_mapping(findings)))
    assert "is a report of parity, not of the gate" in text
    assert "fix: gate ... --parity r.json" in text


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[1]", "expected a JSON object"),
        ("{", "not JSON"),
        ('{"a": 1}', "expected format 'draftquant gate', got None"),
        ('{"format": ["x"]}', r"expected format 'draftquant gate', got \['x'\]"),
        ('{"format": "draftquant gate", "schema_version": true}', "draftquant: missing key"),
        ('{"format": "draftquant gate", "format": 1}', "key 'format' given twice"),
    ],
)
def test_foreign_json(text: str, what: str) -> None:
    with pytest.raises(GateError, match=what):
        parse_report(text, "r.json")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(GateError, match="cannot be read"):
        read_report(tmp_path / "none.json")
    with pytest.raises(GateError, match="a folder, not a file"):
        read_report(tmp_path)


def change(*path: str | int, to: Any) -> Callable[[dict[str, Any]], None]:
    def edit(mapping: dict[str, Any]) -> None:
        at: Any = mapping
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = to

    return edit


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda mapping: mapping.pop(name)


CONTRADICTIONS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "exit code": (change("exit_code", to=1), "exit_code: PASS has 0, got 1"),
    "K": (change("num_draft_tokens", to=0), "num_draft_tokens: expected 1 to 1000, got 0"),
    "length": (change("baseline", "mean_acceptance_length", to=9.0), "expected 1 to 2"),
    "histogram": (change("candidate", "histogram", to=[1]), "expected 2 counts of verify steps"),
    "negative": (change("candidate", "histogram", to=[-1, 2]), "expected 2 counts of verify steps"),
    "no round": (change("candidate", "histogram", to=[0, 0]), "expected 2 counts of verify steps"),
    "survival": (change("baseline", "survival", to=[1.5]), r"survival: expected 1 shares in \[0"),
    "conditional": (change("baseline", "conditional", to=[]), "conditional: expected 1 shares"),
    "bounds": (change("change", "lower", to=1.0), "expected lower <= log_ratio <= upper"),
    "huge": (change("change", "upper", to=1e300), "expected lower <= log_ratio <= upper"),
    "confidence": (change("change", "confidence", to=1.0), r"expected a share in \(0.5, 1\)"),
    "limit": (change("policy", "max_relative_drop", to=1.0), "max_relative_drop.* shares"),
    "release": (change("policy", "max_relative_drop", to=0.5), "the policy 'release' has 0.01"),
    "no rounds": (change("prompts", 3, "baseline", to=[0.5, 0]), "prompts: 'p3': expected 2 c"),
    "look": (change("look", to={"number": 3, "total": 2, "spending": "pocock"}), "look: expected"),
    "prompt": (change("prompts", 3, "baseline", to=[1, 2, 3]), "prompts: 'p3': expected 2 counts"),
    "unknown key": (change("color", to=1), "color: unknown key"),
    "missing key": (drop("policy"), "policy: missing key"),
    "kind": (change("kind", to="x"), "kind: expected 'comparison' or 'joint'"),
    "no kind": (drop("kind"), "kind: missing key"),
    "type": (change("drafts", "candidate", "sha256", to=1), "drafts.candidate.sha256: expected"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_no_gate_says(name: str) -> None:
    edit, what = CONTRADICTIONS[name]
    mapping = json.loads(text_of(comparison()))
    edit(mapping)
    with pytest.raises(GateError, match=what) as caught:
        parse_report(document_text(mapping), "r.json")
    assert "is no report of the gate" in str(caught.value)


@pytest.mark.parametrize(
    ("judged", "edit", "what"),
    [
        (joint, change("exit_code", to=3), "exit_code: PASS has 0, got 3"),
        (joint, change("noise", "change", "upper", to=99.0), "expected lower <="),
        (joint, change("parity", 0, "threshold", to=None), "PASS without a threshold"),
    ],
)
def test_what_no_gate_says_of_several(
    judged: Callable[[], Judgement], edit: Callable[[dict[str, Any]], None], what: str
) -> None:
    mapping = json.loads(text_of(judged()))
    edit(mapping)
    with pytest.raises(GateError, match=what):
        parse_report(document_text(mapping), "r.json")


def test_a_joint_report_of_nothing() -> None:
    mapping = json.loads(text_of(joint())) | {"served": None, "replayed": None}
    with pytest.raises(GateError, match="served, replayed: expected one of them"):
        parse_report(document_text(mapping), "r.json")


# ---- what does not follow from the counts


def edited(judged: Judgement, *edits: Callable[[dict[str, Any]], None]) -> str:
    mapping = json.loads(text_of(judged))
    for edit in edits:
        edit(mapping)
    return document_text(mapping)


def two_categories(verdict: str = "INCONCLUSIVE") -> Judgement:
    return comparison(verdict, categories="aabb")


FORGED: dict[str, tuple[list[Callable[[dict[str, Any]], None]], str]] = {
    "verdict": (
        [change("verdict", to="PASS"), change("exit_code", to=0)],
        "verdict: expected 'INCONCLUSIVE', got 'PASS'",
    ),
    "bound": ([change("change", "upper", to=0.5)], r"change\.upper: expected -?0\.0"),
    "figure": ([change("relative_change", to=0.0)], r"relative_change: expected -0\.0"),
    "length": (
        [change("candidate", "mean_acceptance_length", to=1.602)],
        r"candidate\.mean_acceptance_length: expected 1\.59",
    ),
    "counts": (
        [change("prompts", 0, "candidate", to=[0, 1000])], r"candidate\.histogram: expected",
    ),
    "all counts": (
        [
            lambda mapping: [prompt.update(candidate=prompt["baseline"])
                             for prompt in mapping["prompts"]],
            lambda mapping: mapping["candidate"].update(histogram=mapping["baseline"]["histogram"]),
        ],
        "verdict: expected 'PASS', got 'INCONCLUSIVE'",
    ),
    "no counts": ([change("prompts", to=[])], "prompts: expected one at least"),
    "copies": ([change("num_copies", to=1)], "num_copies: expected 0, got 1"),
    "prompts": ([change("num_prompts", to=400)], "num_prompts: expected 40, got 400"),
    "short ones": ([change("num_short_prompts", to=-1)], "num_short_prompts"),
    "policy": (
        [change("policy", "name", to="custom"), change("policy", "max_relative_drop", to=0.5)],
        "verdict: expected 'PASS'",
    ),
    "looser": (
        [change("policy", "name", to="custom"), change("policy", "min_prompts", to=29)],
        r"looser_than_release: expected '1 of them', got '0'",
    ),
    "category": ([change("categories", 0, "outcome", to="PASS")], r"categories\[0\]\.outcome"),
    "advice": ([change("required_num_prompts", to=None)], "required_num_prompts: expected"),
    "look": (
        [change("look", to={"number": 1, "total": 2, "spending": "pocock"})],
        r"change\.\w+: expected",
    ),
    "candidate": (
        [change("background", "candidate_sha256", to="9" * 64)], r"drafts\.candidate\.sha256",
    ),
    "baseline": (
        [change("drafts", "baseline", "sha256", to="9" * 64)], r"drafts\.baseline\.sha256",
    ),
    "nothing counted": ([change("traces", to=None)], "traces, served: expected one of them"),
    "too few rounds": (
        [change("num_short_prompts", to=999_999)], "verify steps per prompt on average",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_what_does_not_follow_from_its_counts(name: str) -> None:
    edits, what = FORGED[name]
    text = said(edited(two_categories(), *edits))
    assert "says what does not follow from its own counts" in text
    assert re.search(what, text), text


def test_sentences_are_written_anew() -> None:
    judged: Any = two_categories()
    nicer = [change("reason", to="All is well."), change("action", to=None)]
    read = parse_report(edited(judged, *nicer, change("warnings", to=[])), "r.json").judgement
    assert (read.reason, read.action) == (judged.reason, judged.action)
    assert read.warnings == judged.warnings


def test_a_report_without_a_date_is_read() -> None:
    """Of before; and what is no date is no report."""
    mapping = json.loads(text_of(two_categories(), date="2026-11-23T07:42:26Z"))
    assert parse_report(document_text(mapping), "r.json").header.date == "2026-11-23T07:42:26Z"
    del mapping["date"], mapping["background"]["recipes_to_try"]
    assert parse_report(document_text(mapping), "r.json").header.date is None
    for date in ("yesterday", "2026-11-23", "2026-13-01T00:00:00Z", "2026-11-23T7:42:26Z"):
        with pytest.raises(GateError, match="date: expected YYYY-MM-DDThh:mm:ssZ"):
            parse_report(document_text(mapping | {"date": date}), "r.json")


@pytest.mark.parametrize("head", [None, {"num_bins": 15}])
def test_what_earlier_versions_wrote_beside_the_counts_is_passed_over(head: object) -> None:
    """In every comparison of a report."""
    mapping = mapping_of(joint())
    for one in (mapping["replayed"], mapping["served"]):
        one["background"]["confidence_head"] = head
    assert parse_report(document_text(mapping), "r.json") == document(joint())


def test_reports_of_0_2_0_are_read_but_for_those_of_fine_tuned_drafts() -> None:
    mapping = json.loads(text_of(joint()))
    mapping["drafts"]["tuned"] = None
    for part in ("replayed", "served"):
        mapping[part]["background"]["taught"] = False
    assert parse_report(document_text(mapping), "r.json") == document(joint())
    for edit in (
        change("drafts", "tuned", to={"name": "tuned", "sha256": None}),
        change("replayed", "background", "taught", to=True),
    ):
        changed = json.loads(text_of(joint()))
        edit(changed)
        with pytest.raises(GateError, match=r"tuned: unknown key|taught: unknown key"):
            parse_report(document_text(changed), "r.json")
    for changed in (mapping | {"kind": "retuned"}, mapping | {"replayed": {"kind": "retuned"}}):
        with pytest.raises(GateError, match=r"fine-tuned \(retune\), which draftquant 0\.2\.0"):
            parse_report(document_text(changed), "r.json")


def test_drafts_that_cannot_be_compared_stay_so() -> None:
    judged = judge(
        replay(BASELINE),
        replay(noisy(3, 4), traces=dataclasses.replace(FIGURES, sha256="8" * 64)),
        RELEASE,
        background=HASHES,
    )
    assert "no comparison is possible" in judged.reason
    assert parse_report(text_of(judged), "r.json").judgement.verdict == "ANOMALOUS"
    forged = said(edited(judged, change("verdict", to="PASS"), change("exit_code", to=0)))
    assert "verdict: expected 'ANOMALOUS', got 'PASS'" in forged


def test_what_does_not_follow_of_several() -> None:
    for judged, edit, what in (
        (joint, change("replayed", "num_prompts", to=3), "num_prompts: expected 40, got 3"),
        (joint, change("served", "num_prompts", to=3), "num_prompts: expected 40, got 3"),
        (joint, change("noise", "drift", "confidence", to=0.95), "noise.drift.confidence"),
        (joint, change("noise", "verdict", to="FAIL"), "noise.verdict: expected PASS, got FAIL"),
        (joint, change("served", to=None), "noise: expected served beside it"),
    ):  # fmt: skip
        assert what in said(edited(judged(), edit)), what


def test_the_worst_of_several_counts() -> None:
    mapping = json.loads(text_of(joint()))
    mapping["parity"][0]["verdict"] = "FAIL"
    assert "verdict: expected 'FAIL', got 'PASS'" in said(document_text(mapping))


def test_many_prompts_are_judged_again_at_once() -> None:
    """2,000 prompts of 40 categories: well below the time that reading the file takes."""
    names = "".join(chr(0x4E00 + i) for i in range(40))
    drafts = [replay(each, categories=names) for each in (spread(600, 2000), noisy(3, 4, 2000))]
    text = text_of(judge(*drafts, RELEASE, background=HASHES))
    start = time.process_time()
    assert parse_report(text, "r.json").judgement.verdict == "PASS"
    assert time.process_time() - start < 2


# ---- its documentation


def keys_of(cls: type) -> Iterator[str]:
    """Of a dataclass, and of all dataclasses in it."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield field.name
        for kind in classes_in(hints[field.name]):
            yield from keys_of(kind)


def classes_in(hint: Any) -> Iterator[type]:
    if dataclasses.is_dataclass(hint):
        yield typing.cast(type, hint)
    for inner in typing.get_args(hint):
        yield from classes_in(inner)


OF_TRACES = {"config_sha256", "weights_sha256", "num_layers", "vocab_size", "top_p", "top_k",
             "seed", "repeats", "constant", "misplaced", "share"}  # fmt: skip
"""Keys of trace.json and of what the traces say of themselves."""


def test_every_key_of_a_replay_is_documented() -> None:
    text = (ROOT / "docs" / "report-format.md").read_text(encoding="utf-8")
    section = text.partition("## What `replay --json` prints")[2]
    written = {
        word for span in re.findall(r"`([^`]+)`", section) for word in re.findall(r"\w+", span)
    }
    keys = {f.name for kind in (ReplayedDraft, ReplayedPrompt) for f in dataclasses.fields(kind)}
    assert keys - written == set()


def test_every_key_is_documented_and_no_other() -> None:
    text = (ROOT / "docs" / "report-format.md").read_text(encoding="utf-8")
    written = {word for span in re.findall(r"`([^`]+)`", text) for word in re.findall(r"\w+", span)}
    kinds = (Header, GateReport, JointReport)
    keys = {key for kind in kinds for key in keys_of(kind)} - OF_TRACES
    assert keys - written == set()
    cells = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
    named = {word for cell in cells for word in re.findall(r"`(\w+)`", cell)}
    assert named - keys == set()
    assert f"`schema_version` is {document_module.SCHEMA_VERSION}." in text
    assert f'`"{document_module.FORMAT}"`' in text
