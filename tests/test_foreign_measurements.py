"""Measurements of other tools: real files of four, files by the source of SGLang, hostile ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import handmade_foreign as handmade
import pytest
from draftquant.api import DraftQuantWarning, compare, gate
from draftquant.api import report as make_report
from draftquant.recipes.errors import CompareError, GateError, GoldenError, MeasureError
from draftquant.scripts.frame.reports import GateReport
from draftquant.validate.foreign.foreign_formats import (
    AVERAGES,
    FORMATS,
    read_foreign,
    read_foreign_pair,
)
from handmade_foreign import FOREIGN
from handmade_reports import ONE_BY_ONE, jointly, lost

DOCS = Path(__file__).parents[1] / "docs" / "servers.md"
REAL = {
    "aiperf": "aiperf-{}/profile_export.jsonl",
    "guidellm": "guidellm-{}.json",
    "responses": "vllm-answers-{}.jsonl",
}
ANSWERS = FOREIGN / "vllm-answers-bf16.jsonl"
Lines = list[dict[str, Any]]


def both(pattern: str) -> list[Path]:
    return [FOREIGN / pattern.format(name) for name in ("bf16", "int4")]


def judged(paths: list[Path], **options: Any) -> GateReport:
    report = gate(measured=paths, min_prompts=2, **options)
    assert isinstance(report, GateReport)
    return report


def sums(path: Path) -> tuple[int, ...]:
    histograms = (request.histogram for request in read_foreign(path).requests)
    return tuple(map(sum, zip(*histograms, strict=True)))


def changed(path: Path, place: Path, change: Callable[[Any], object]) -> Path:
    """A copy of JSON lines, or of a document, after a change of what it holds."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    change(lines if path.suffix != ".json" else lines[0])
    place.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return place


def test_files_of_three_tools_count_the_same_steps_and_give_one_verdict(tmp_path: Path) -> None:
    for name in ("bf16", "int4"):
        assert len({sums(FOREIGN / pattern.format(name)) for pattern in REAL.values()}) == 1
    reports = [judged(both(pattern)) for pattern in REAL.values()]
    assert len({report.relative_change for report in reports}) == 1
    for report in reports:
        assert report.num_prompts == 8
        assert report.served is not None
        assert report.served.identical_share == 1
        assert not report.background.not_compared
        assert any("no record of which draft" in warning for warning in report.warnings)
    written = tmp_path / "r.json"  # and is judged again when it is read
    assert gate(measured=both(REAL["guidellm"]), report=written).verdict
    assert json.loads(written.read_text(encoding="utf-8"))["served"]["tool"] == "GuideLLM 0.8.1"


AIPERF_SGLANG = FOREIGN / "aiperf-sglang/profile_export.jsonl"
STEPS_OF_TRTLLM = {"engine": "tensorrt_llm", "mean_acceptance_length": 3.2, "num_spec_steps": 10,
                   "draft_acceptance_rate": 0.7, "acceptance_histogram": {"0": 1, "1": 1, "2": 3,
                   "3": 5}, "num_accepted_draft_tokens": 22, "num_draft_tokens": 30}  # fmt: skip
K_CHANGES = {"spec_decode_acceptance": STEPS_OF_TRTLLM | {"num_draft_tokens": 32}}
LACKS: tuple[Callable[[Lines], object], ...] = (
    lambda lines: lines[1]["metadata"].update(x_request_id="no raw record"),
    lambda lines: lines[0].update(K_CHANGES),
    lambda lines: lines[0]["metrics"].pop("usage_completion_tokens"),
)


def test_aiperf_holds_what_each_engine_reports(tmp_path: Path) -> None:
    """SGLang's answers, which 0.13 keeps raw, records of any engine (0.14), and categories."""
    run = read_foreign(AIPERF_SGLANG)
    assert (run.engine, run.num_draft_tokens, run.has_outputs) == ("sglang", 3, True)
    assert [r.category for r in run.requests] == ["coding", "math", "qa"] * 2
    assert run.requests[0].histogram == (1, 1, 3, 5)
    shutil.copytree(AIPERF_SGLANG.parent, tmp_path / "a")
    path = tmp_path / "a" / AIPERF_SGLANG.name

    def later(lines: Lines) -> None:
        lines[:] = [lines[0] | {"spec_decode_acceptance": STEPS_OF_TRTLLM}]
        lines[0]["metadata"]["source_kind"] = "stem"

    newer = read_foreign(changed(AIPERF_SGLANG, path, later))
    assert (newer.engine, newer.num_draft_tokens) == ("tensorrt_llm", 3)
    assert [(r.category, r.histogram) for r in newer.requests] == [("stem", (1, 1, 3, 5))]
    for change in LACKS:
        with pytest.raises(MeasureError):
            read_foreign(changed(AIPERF_SGLANG, path, change))

    def pinged(lines: Lines) -> None:
        lines[0]["responses"][0]["packets"] += [{"name": "comment", "value": "ping"}]

    raw = f"{path.stem}_raw.jsonl"
    shutil.copy(AIPERF_SGLANG, path)
    changed(AIPERF_SGLANG.with_name(raw), path.with_name(raw), pinged)
    assert read_foreign(path).requests == run.requests
    changed(AIPERF_SGLANG.with_name(raw), path.with_name(raw), list.clear)
    with pytest.raises(MeasureError):
        read_foreign(path)


def test_pages_of_sums_show_nothing_by_position(tmp_path: Path) -> None:
    """As reports of earlier versions have them."""
    gate(measured=both(REAL["guidellm"]), min_prompts=2, report=(written := tmp_path / "r.json"))
    report = json.loads(written.read_text(encoding="utf-8"))
    for told in (True, False):
        report["served"]["told_positions"] = told
        written.write_text(json.dumps(report), encoding="utf-8")
        make_report(written, html=(html := tmp_path / f"{told}.html"))
        shown = html.read_text(encoding="utf-8")
        for words in ("accepted the token at each position", "accepted position j"):
            assert (words in shown) is told
        assert ("So nothing is shown by position." in shown) is not told


def test_golden_acceptance_is_not_made_of_another_tools_measurements(tmp_path: Path) -> None:
    """Whose it is is not known, and of sums nothing is known by position; the verdict stays."""
    golden, written = tmp_path / "g.json", tmp_path / "r.json"
    with pytest.warns(DraftQuantWarning, match="do not record whose acceptance they hold"):
        report = judged(both(REAL["guidellm"]), golden=golden, report=written)
    assert report.verdict
    assert not golden.exists()
    with pytest.raises(GoldenError):
        make_report(written, golden=golden)


@pytest.mark.parametrize("form", ["log", "chat", "batch", "generate"])
def test_sglang_counts_as_its_source_writes(form: str, tmp_path: Path) -> None:
    if form == "log":
        assert sums(handmade.sglang(tmp_path / "s", "bf16")) == sums(ANSWERS)
        return
    paths = [handmade.sglang_answers(tmp_path / f"{n}.jsonl", n, form) for n in ("bf16", "int4")]
    assert sums(paths[0]) == sums(ANSWERS)
    report, known = judged(paths), judged(both(REAL["guidellm"]))
    assert report.relative_change == known.relative_change
    assert report.served is not None
    assert (report.served.tool, report.served.identical_share) == ("answers of SGLang", 1)
    turned = judged([paths[0], changed(paths[1], paths[1], list.reverse)])
    if form == "batch":
        assert turned.relative_change == known.relative_change
    else:  # paired by place: the outputs are others
        assert "the two targets differ" in turned.reason.lower()


def test_an_answer_of_one_token_has_no_verify_step(tmp_path: Path) -> None:
    path = handmade.sglang_answers(tmp_path / "s.jsonl", "bf16", "completion")

    def refused(change: Callable[[Lines], object]) -> None:
        with pytest.raises(MeasureError):
            read_foreign(changed(path, path, change))

    refused(lambda lines: lines[0].pop("sglext"))
    changed(path, path, lambda lines: lines[0]["usage"].update(completion_tokens=1))
    assert read_foreign(path).requests[0].histogram == (0, 0, 0, 0)
    told = {"spec_correct_drafts_histogram": [1, 2]}
    refused(lambda lines: lines[1]["sglext"]["spec_tokens_details"].update(told))
    other = json.loads(ANSWERS.read_text(encoding="utf-8").splitlines()[0])
    refused(lambda lines: lines.__setitem__(1, other))


def steps_of(line: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = line["metrics"]["speculative_decoding"]
    return found


def cut_off(kind: str) -> Callable[[Any], object]:
    def change(report: Any) -> None:
        requests = report["benchmarks"][0]["requests"]
        requests[kind] = [requests["successful"].pop()]

    return change


ABORTED = {"type": "abort", "message": "client went away"}
HUGE = 10**12
REFUSED: tuple[tuple[str, Callable[[Any], object]], ...] = (
    ("guidellm", cut_off("errored")),
    ("guidellm", cut_off("incomplete")),
    ("answers", lambda lines: lines[1]["choices"][0].update(finish_reason="abort")),
    ("answers", lambda lines: lines[1]["choices"][0].update(finish_reason="error")),
    ("answers", lambda lines: lines.append({"error": {"message": "out of memory"}})),
    ("aiperf", lambda lines: lines[2]["metadata"].update(was_cancelled=True)),
    ("sglang", lambda lines: lines[0].update(finish_reason=ABORTED)),
    ("answers", lambda lines: steps_of(lines[3]).update(num_spec_steps=3)),
    ("answers", lambda lines: lines[0].update(metrics=None)),
    ("aiperf", lambda lines: lines[0]["spec_decode_acceptance"].update(num_spec_tokens=HUGE)),
    ("sglang", lambda lines: lines[0].update(
        spec_num_proposed_drafts=lines[0]["spec_verify_ct"] * HUGE)),
    ("answers", lambda lines: steps_of(lines[0])["acceptance_histogram"].append(0)),
    ("answers", lambda lines: lines[0]["choices"].append({})),
    ("aiperf", lambda lines: lines[0].update(error={"message": "no answer"})),
    ("aiperf", lambda lines: lines[0]["spec_decode_acceptance"]["acceptance_histogram"].update(
        {"99": 1})),
    ("guidellm", lambda report: report["benchmarks"].append({})),
    ("sglang", lambda lines: lines[0].update(request_parameters="{}")),
    ("sglang", lambda lines: lines[0]["spec_correct_drafts_histogram"].extend([0] * 9)),
)  # fmt: skip


def sources(folder: Path) -> dict[str, Path]:
    shutil.copytree(FOREIGN / "aiperf-bf16", folder / "a")
    return {
        "guidellm": FOREIGN / "guidellm-bf16.json",
        "answers": ANSWERS,
        "aiperf": folder / "a" / "profile_export.jsonl",
        "sglang": handmade.sglang(folder / "s.log", "bf16"),
        "chat": handmade.sglang_answers(folder / "c.jsonl", "bf16", "chat"),
    }


def test_what_was_cut_contradicts_itself_or_is_huge_is_refused(tmp_path: Path) -> None:
    found = sources(tmp_path)
    for kind, change in REFUSED:
        with pytest.raises(MeasureError):
            read_foreign(changed(found[kind], tmp_path / "a" / f"cut{found[kind].suffix}", change))
    whole, warm = found["aiperf"], {"metadata": {"benchmark_phase": "warmup"}}
    warmed = changed(whole, whole.with_name("warm.jsonl"), lambda lines: lines.insert(1, warm))
    assert sums(warmed) == sums(whole)


def test_what_was_known_before_reaches_the_report() -> None:
    for known in ONE_BY_ONE:
        assert lost(known, jointly(read_foreign_pair(*both(REAL["guidellm"])), known)) == []


def test_what_a_file_cannot_show_keeps_a_draft_from_passing(tmp_path: Path) -> None:
    def drawn(lines: Lines) -> None:
        for line in lines:
            asked = json.loads(line["request_parameters"])
            asked["sampling_params"]["temperature"] = 0.7
            line["request_parameters"] = json.dumps(asked)

    wide, names = {"max_relative_drop": 0.5}, ("bf16", "int4")
    whole = [handmade.sglang(tmp_path / f"{name}.log", name) for name in names]
    assert judged(whole, **wide).verdict == "PASS"
    assert judged([changed(path, path, drawn) for path in whole], **wide).verdict == "INCONCLUSIVE"
    silent = [handmade.sglang(tmp_path / f"{n}-.log", n, logprobs=False) for n in names]
    assert judged(silent, **wide).verdict == "INCONCLUSIVE"
    for name in names:
        shutil.copytree(FOREIGN / f"aiperf-{name}", tmp_path / name)
        (tmp_path / name / "profile_export_raw.jsonl").unlink()
    without = [tmp_path / name / "profile_export.jsonl" for name in names]
    assert judged(without, **wide).verdict == "INCONCLUSIVE"


def left_out(lines: Lines) -> None:
    """Verify steps that accepted nothing are not told, as some engines do under load."""
    for line in lines:
        told = steps_of(line)
        told["num_spec_steps"] -= told["acceptance_histogram"][0]
        told["acceptance_histogram"][0] = 0
        told["per_step_accepted"] = None


def rewritten(lines: Lines) -> None:
    for place, line in enumerate(lines):
        line["choices"][0]["text"] = f"{place} something else altogether"


def test_runs_that_differ_are_anomalous_and_no_comparison(tmp_path: Path) -> None:
    own, other = both(REAL["guidellm"])
    warm = '\\"temperature\\":0.8' + "".join(f',\\"u{i}\\":1' for i in range(9))
    text = other.read_text(encoding="utf-8").replace('\\"temperature\\":0', warm)
    (tmp_path / "w.json").write_text(text, encoding="utf-8")
    reason = judged([own, tmp_path / "w.json"]).reason
    assert "temperature: 0, 0.8" in reason
    assert [f"u{i}: " in reason for i in range(9)] == [True] * 4 + [False] * 5  # five are enough
    for pattern, change, said in (
        (REAL["responses"], list.pop, "8 and 7 requests"),
        (REAL["responses"], lambda lines: lines[0]["choices"][0]["prompt_token_ids"].append(1),
         "different prompts"),
        (REAL["responses"], lambda lines: [line.update(model="x") for line in lines], "model: "),
        (REAL["responses"], left_out, "are no verify steps"),
        (REAL["responses"], rewritten, "the two targets differ"),
    ):  # fmt: skip
        own, other = both(pattern)
        runs = [own, changed(other, tmp_path / f"other{other.suffix}", change)]
        found = judged(runs)
        assert found.verdict == "ANOMALOUS"
        assert said in found.reason.replace("The two", "the two")
        with pytest.raises(CompareError):
            compare(runs)


def test_one_run_twice_or_two_tools_are_refused(tmp_path: Path) -> None:
    own, other = both(REAL["guidellm"])

    def reworded(lines: Lines) -> None:
        for line in lines:
            line["choices"][0]["text"] += "."

    assert judged([ANSWERS, changed(ANSWERS, tmp_path / "x.jsonl", reworded)]).relative_change == 0
    for runs, options, error in (
        ([own, own], {}, GateError),
        ([own, FOREIGN / "vllm-answers-int4.jsonl"], {}, MeasureError),
        ([own, other], {"baseline_again": own}, GateError),
    ):
        with pytest.raises(error):
            gate(measured=runs, **options)  # type: ignore[arg-type]
    assert any("paired by the prompt" in warning for warning in compare([own, other]).warnings)
    with pytest.raises(CompareError):
        compare([own, FOREIGN / "vllm-answers-int4.jsonl"])


def test_copies_are_one_cluster(tmp_path: Path) -> None:
    """Under many ids, and where no prompt is kept."""

    def named(lines: Lines) -> None:
        body = lines[0]
        del body["choices"][0]["prompt_token_ids"]
        answer = {"error": None, "response": {"status_code": 200, "body": body}}
        lines[:] = [{"custom_id": f"c{place}", **answer} for place in range(9)]

    def copied(lines: Lines) -> None:
        lines[:] = [{**lines[3], "id": f"q{place}"} for place in range(9)]

    for path, change in ((handmade.sglang(tmp_path / "s.log", "bf16"), copied), (ANSWERS, named)):
        run = read_foreign(changed(path, tmp_path / f"x{path.suffix}", change))
        assert len({request.prompt.counted_with for request in run.requests}) == 1


STEPS = {"speculative_decoding": {"num_spec_tokens": 3, "acceptance_histogram": [9, 3, 1, 5]}}
AVERAGED = (
    {"accept_length": 2.8, "backend": "sglang", "random_range_ratio": 0.0},
    json.loads((FOREIGN / "aiperf-bf16/profile_export_aiperf.json").read_text(encoding="utf-8")),
    {"backend": "vllm", "model_id": "t", "num_prompts": 48, "spec_decode_num_drafts": 1832},
    {"marginal_accept_rates": [0.7], "conditional_accept_rates": [0.7], "mean_accept_length": 1.7},
    {"data": {"object": "chat.completion.chunk", "choices": [], "metrics": STEPS}},
    {"object": "chat.completion", "choices": [{"message": {}, "speculative_decoding": {}}]},
)
ITERATIONS = {"object": "text_completion", "choices": [{"avg_decoded_tokens_per_iter": 2.5}]}
OTHER_KINDS = (
    f"data: {json.dumps(AVERAGED[-2]['data'])}",
    json.dumps({"object": "text_completion", "choices": [], "metrics": STEPS}),
    '{"Request_AL": {}, "Acceptance_Length_Histogram": {}}',
    json.dumps(ITERATIONS), '{\n "tokens": 5,\n "speed": 7\n}', '{"acc_length": 2.8}', "[1, 2]", "",
    '{"request_parameters": ""}',
)  # fmt: skip


def test_what_lacks_verify_steps_is_refused_with_what_to_switch_on(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for average, row in zip(AVERAGED, AVERAGES, strict=True):
        for indent in (None, 1):
            path.write_text(json.dumps(average, indent=indent), encoding="utf-8")
            with pytest.raises(MeasureError) as found:
                gate(measured=[path, path])
            for said in (row.tool, row.switch_on, row.lacks):
                assert said in str(found.value)
    answers = [json.loads(line) for line in ANSWERS.read_text(encoding="utf-8").splitlines()]
    several = (json.dumps(answers), json.dumps(answers[0], indent=2), "\n".join(
        json.dumps(one, indent=2) for one in answers))  # fmt: skip
    for text in (*OTHER_KINDS, *several):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(MeasureError):
            gate(measured=[path, path])


def test_what_windows_and_editors_put_in_front_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    for before in (b"\xef\xbb\xbf", b"\n", b"\r\n\xef\xbb\xbf"):
        path.write_bytes(before + ANSWERS.read_bytes().replace(b"\n", b"\r\n"))
        assert read_foreign(path).requests == read_foreign(ANSWERS).requests


def test_the_page_has_every_format_and_every_average() -> None:
    text = DOCS.read_text(encoding="utf-8")
    named = [said for one in FORMATS for said in (one.tool, one.version)]
    assert [said for said in (*named, *(one.tool for one in AVERAGES)) if said not in text] == []


def mutated(value: Any, place: int, junk: Any) -> tuple[Any, int]:
    """A document whose value number `place`, counted depth first, is another one."""
    if place == 0:
        return junk, -1
    place -= 1
    if isinstance(value, dict | list):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            changed, place = mutated(item, place, junk)
            if place < 0:
                copy = value.copy()
                copy[key] = changed
                return copy, -1
    return value, place


JUNK: tuple[tuple[str, Any], ...] = (
    ("guidellm", None), ("answers", []), ("aiperf", {}), ("aiperf", "x"), ("sglang", -1),
    ("chat", 1.5), ("aiperf", True), ("sglang", []),
)  # fmt: skip


def test_junk_at_any_place_is_read_or_refused_never_a_crash(tmp_path: Path) -> None:
    found, path = sources(tmp_path), tmp_path / "profile_export.jsonl"
    shutil.copy(FOREIGN / "aiperf-bf16/inputs.json", tmp_path)
    for name, junk in JUNK:
        lines = found[name].read_text(encoding="utf-8").splitlines()
        first = json.loads(lines[0])
        counted, fixes = 0, []
        for place in range(0, 90, 3):
            other, left = mutated(first, place, junk)
            if left >= 0:
                break
            path.write_text("\n".join([json.dumps(other), *lines[1:3]]), encoding="utf-8")
            try:
                counted += len(read_foreign(path).requests)
            except MeasureError as exc:
                fixes.append(exc.fix)
        assert all(fixes)
        assert counted or name == "guidellm"
