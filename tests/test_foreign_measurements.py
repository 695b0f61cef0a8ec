"""Measurements of other tools: real files of four of them, and files by the source of SGLang."""

import json
import shutil
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
)
from handmade_foreign import FOREIGN

DOCS = Path(__file__).parents[1] / "docs" / "servers.md"
REAL = {
    "aiperf": "aiperf-{}/profile_export.jsonl",
    "guidellm": "guidellm-{}.json",
    "responses": "vllm-answers-{}.jsonl",
}


def both(pattern: str) -> list[Path]:
    return [FOREIGN / pattern.format(name) for name in ("bf16", "int4")]


def judged(paths: list[Path], **options: Any) -> GateReport:
    report = gate(measured=paths, min_prompts=2, **options)
    assert isinstance(report, GateReport)
    return report


def sums(path: Path) -> tuple[int, ...]:
    histograms = (request.histogram for request in read_foreign(path).requests)
    return tuple(map(sum, zip(*histograms, strict=True)))


def edited(path: Path, place: Path, old: str, new: str) -> Path:
    text = path.read_text(encoding="utf-8")
    assert old in text
    place.write_text(text.replace(old, new), encoding="utf-8")
    return place


def test_real_files_of_three_tools_count_the_same_steps_and_give_one_verdict(
    tmp_path: Path,
) -> None:
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
    written, page = tmp_path / "r.json", tmp_path / "r.html"  # and is judged again when it is read
    assert gate(measured=both(REAL["guidellm"]), report=written, html=page).verdict
    assert json.loads(written.read_text(encoding="utf-8"))["served"]["tool"] == "GuideLLM 0.8.1"
    assert "GuideLLM 0.8.1" in page.read_text(encoding="utf-8")


def test_bench_serve_is_read_where_events_and_counters_agree() -> None:
    for path in both("vllm-bench-{}.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        counts = sums(path)
        assert sum(counts) == result["spec_decode_num_drafts"]
        emitted = sum((j + 1) * count for j, count in enumerate(counts))
        assert emitted == result["total_output_tokens"] - len(result["itls"])
    report = judged(both("vllm-bench-{}.json"))
    assert report.num_prompts == 12
    assert report.served is not None
    assert not report.served.told_positions


def test_pages_of_sums_show_nothing_by_position(tmp_path: Path) -> None:
    shown = {}
    for name, pattern in (("sums", "vllm-bench-{}.json"), ("each step", REAL["guidellm"])):
        html = tmp_path / f"{name}.html"
        gate(measured=both(pattern), min_prompts=2, html=html)
        shown[name] = html.read_text(encoding="utf-8")
    by_position = ("accepted the token at each position", "accepted position j")
    assert not any(words in shown["sums"] for words in by_position)
    assert "So nothing is shown by position." in shown["sums"]
    assert all(words in shown["each step"] for words in by_position)
    assert "So nothing is shown by position." not in shown["each step"]


@pytest.mark.some(1)
@pytest.mark.parametrize("pattern", [REAL["guidellm"], "vllm-bench-{}.json"])
def test_golden_acceptance_is_not_made_of_another_tools_measurements(
    pattern: str, tmp_path: Path
) -> None:
    """Whose it is is not known, and of sums nothing is known by position; the verdict stays."""
    golden, written = tmp_path / "g.json", tmp_path / "r.json"
    with pytest.warns(DraftQuantWarning, match="do not record whose acceptance they hold"):
        report = gate(measured=both(pattern), min_prompts=2, golden=golden, report=written)
    assert report.verdict
    assert not golden.exists()
    with pytest.raises(GoldenError, match="do not record whose acceptance they hold"):
        make_report(written, golden=golden)


def test_bench_serve_is_refused_where_steps_came_together_or_no_detail_is_kept(
    tmp_path: Path,
) -> None:
    with pytest.raises(MeasureError, match=r"2,181 events .* 2,208 verify steps") as found:
        read_foreign(FOREIGN / "vllm-bench-together.json")
    assert "--per-request-spec-decode-metrics" in str(found.value)
    result = json.loads((FOREIGN / "vllm-bench-bf16.json").read_text(encoding="utf-8"))
    del result["itls"]
    path = tmp_path / "b.json"
    path.write_text(json.dumps(result), encoding="utf-8")
    with pytest.raises(MeasureError, match="--save-detailed"):
        read_foreign(path)


def test_sglang_counts_as_its_source_writes(tmp_path: Path) -> None:
    expected = sums(FOREIGN / "guidellm-bf16.json")
    assert sums(handmade.sglang(tmp_path / "s.log", "bf16")) == expected

    lines = (tmp_path / "s.log").read_text(encoding="utf-8").splitlines()
    one = json.loads(lines[0]) | {"completion_tokens": 1}  # the prefill gave it: no verify step
    one = {key: value for key, value in one.items() if not key.startswith("spec_")}
    one["output_token_logprobs"] = one["output_token_logprobs"][:1]
    (tmp_path / "s.log").write_text("\n".join([json.dumps(one), *lines[1:]]), encoding="utf-8")
    found = read_foreign(tmp_path / "s.log").requests
    assert [sum(request.histogram) for request in found if request.num_output_tokens == 1] == [0]


@pytest.mark.parametrize("form", ["chat", "batch", "generate"])
def test_answers_of_sglang_count_as_its_source_writes(form: str, tmp_path: Path) -> None:
    paths = [handmade.sglang_answers(tmp_path / f"{n}.jsonl", n, form) for n in ("bf16", "int4")]
    assert sums(paths[0]) == sums(FOREIGN / "guidellm-bf16.json")
    report, known = judged(paths), judged(both(REAL["guidellm"]))
    assert report.relative_change == known.relative_change
    assert report.served is not None
    assert (report.served.tool, report.served.identical_share) == ("answers of SGLang", 1)
    lines = paths[1].read_text(encoding="utf-8").splitlines()
    paths[1].write_text("\n".join(reversed(lines)), encoding="utf-8")
    if form == "batch":
        assert judged(paths).relative_change == known.relative_change
    else:  # paired by place: the outputs are others
        assert "the two targets differ" in judged(paths).reason.lower()


def test_an_answer_of_one_token_has_no_verify_step(tmp_path: Path) -> None:
    path = handmade.sglang_answers(tmp_path / "s.jsonl", "bf16", "completion")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def refused(what: str) -> None:
        path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        with pytest.raises(MeasureError, match=what):
            read_foreign(path)

    del lines[0]["sglext"]
    refused(r"(?s)s.jsonl:1: expected metrics.*return_spec_tok")
    lines[0]["usage"]["completion_tokens"] = 1
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert read_foreign(path).requests[0].histogram == (0, 0, 0, 0)
    lines[1]["sglext"]["spec_tokens_details"]["spec_correct_drafts_histogram"] = [1, 2]
    refused(r"s.jsonl:2: spec_verify_ct: expected 3 by spec_correct")
    lines[1] = json.loads((FOREIGN / "vllm-answers-bf16.jsonl").read_text("utf-8").splitlines()[0])
    refused("expected answers of one engine, got")


def test_a_request_that_was_cut_is_not_left_out(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    for kind in ("errored", "incomplete"):
        report = json.loads((FOREIGN / "guidellm-bf16.json").read_text(encoding="utf-8"))
        requests = report["benchmarks"][0]["requests"]
        requests[kind] = [requests["successful"].pop()]
        path.write_text(json.dumps(report), encoding="utf-8")
        with pytest.raises(MeasureError, match=f"1 requests are {kind}"):
            read_foreign(path)


def test_what_a_file_cannot_show_keeps_a_draft_from_passing(tmp_path: Path) -> None:
    wide = {"max_relative_drop": 0.5}
    whole = [handmade.sglang(tmp_path / f"{name}.log", name) for name in ("bf16", "int4")]
    assert judged(whole, **wide).verdict == "PASS"
    silent = [handmade.sglang(tmp_path / f"{n}-.log", n, logprobs=False) for n in ("bf16", "int4")]
    found = judged(silent, **wide)
    assert found.verdict == "INCONCLUSIVE"
    assert "Not compared: whether both servers ran one target" in found.reason
    assert "--return-logprob" in (found.action or "")
    for name in ("bf16", "int4"):
        shutil.copytree(FOREIGN / f"aiperf-{name}", tmp_path / name)
        (tmp_path / name / "profile_export_raw.jsonl").unlink()
    found = judged([tmp_path / n / "profile_export.jsonl" for n in ("bf16", "int4")], **wide)
    assert found.verdict == "INCONCLUSIVE"
    assert "--export-level raw" in (found.action or "")
    assert found.served is not None
    assert found.served.identical_share is None


def test_runs_that_differ_are_anomalous(tmp_path: Path) -> None:
    own, other = both(REAL["guidellm"])
    warmer = edited(other, tmp_path / "w.json", '\\"temperature\\":0', '\\"temperature\\":0.8')
    assert "temperature: 0, 0.8" in judged([own, warmer]).reason
    lines = both(REAL["responses"])[1].read_text(encoding="utf-8").splitlines()
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("\n".join(lines[:-1]), encoding="utf-8")
    assert "8 and 7 requests" in judged([both(REAL["responses"])[0], fewer]).reason
    result = json.loads((FOREIGN / "vllm-bench-int4.json").read_text(encoding="utf-8"))
    result["input_lens"][0] += 1
    longer = tmp_path / "longer.json"
    longer.write_text(json.dumps(result), encoding="utf-8")
    assert "different prompts" in judged([FOREIGN / "vllm-bench-bf16.json", longer]).reason
    own, other = both(REAL["responses"])
    more = edited(other, tmp_path / "l.jsonl", '"completion_tokens": 64', '"completion_tokens": 90')
    assert "are no verify steps" in judged([own, more]).reason
    answers = [json.loads(line) for line in lines]
    for place, answer in enumerate(answers):
        answer["choices"][0]["text"] = f"{place} something else altogether"
    fewer.write_text("".join(json.dumps(one) + "\n" for one in answers), encoding="utf-8")
    found = judged([own, fewer])
    assert (found.verdict, "the two targets differ" in found.reason.lower()) == ("ANOMALOUS", True)


def test_one_run_twice_or_two_tools_are_refused() -> None:
    own, other = both(REAL["guidellm"])
    with pytest.raises(GateError, match="the same outputs and verify steps"):
        gate(measured=[own, own])
    with pytest.raises(MeasureError, match="in different ways"):
        gate(measured=[own, FOREIGN / "vllm-answers-int4.jsonl"])
    with pytest.raises(GateError, match="of another tool"):
        gate(measured=[own, other], baseline_again=own)


def test_counts_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    path = FOREIGN / "vllm-answers-bf16.jsonl"
    wrong = edited(path, tmp_path / "w.jsonl", '"num_spec_steps": 2', '"num_spec_steps": 3')
    with pytest.raises(MeasureError, match=r"w.jsonl:\d+: num_spec_steps: expected \d+ by"):
        read_foreign(wrong)
    silent = handmade.rewritten(path, tmp_path / "s.jsonl", {"metrics": None})
    with pytest.raises(MeasureError, match="--per-request-spec-decode-metrics"):
        read_foreign(silent)


STEPS = {"speculative_decoding": {"num_spec_tokens": 3, "acceptance_histogram": [9, 3, 1, 5]}}
AVERAGED = (
    {"accept_length": 2.8, "backend": "sglang", "random_range_ratio": 0.0},
    {"acc_length": 2.8, "last_gen_throughput": 900.0},
    json.loads((FOREIGN / "aiperf-bf16/profile_export_aiperf.json").read_text(encoding="utf-8")),
    {"backend": "vllm", "model_id": "t", "num_prompts": 48, "spec_decode_num_drafts": 1832},
    {"marginal_accept_rates": [0.7], "conditional_accept_rates": [0.7], "mean_accept_length": 1.7},
    {"accept_length": 2.8, "acceptance_rate": 0.6, "num_drafts": 1832, "num_prompts": 48},
    {"data": {"object": "chat.completion.chunk", "choices": [], "metrics": STEPS}},
    {"object": "chat.completion", "choices": [{"message": {}, "speculative_decoding": {}}]},
)


def test_an_average_without_counts_is_refused_with_what_to_switch_on(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for average, row in zip(AVERAGED, AVERAGES, strict=True):
        for indent in (None, 1):
            path.write_text(json.dumps(average, indent=indent), encoding="utf-8")
            with pytest.raises(MeasureError) as found:
                gate(measured=[path, path])
            for said in (row.tool, row.switch_on, row.lacks):
                assert said in str(found.value)


OTHER_KINDS = (
    (f"data: {json.dumps(AVERAGED[6]['data'])}", "of a stream of answers"),
    (
        json.dumps({"object": "text_completion", "choices": [], "metrics": STEPS}),
        "of a stream of answers",
    ),
    ('{"Request_AL": {}, "Acceptance_Length_Histogram": {}}', "Optimizer"),
    (
        '{"object": "text_completion", "choices": [{"avg_decoded_tokens_per_iter": 2.5}]}',
        "TensorRT-LLM's server",
    ),
    ('{\n "tokens": 5,\n "speed": 7\n}', r"holds the keys \['speed', 'tokens'\]: neither"),
    ("[1, 2]", "holds a list: neither"),
)


def test_what_lacks_verify_steps_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text, message in OTHER_KINDS:
        path.write_text(text, encoding="utf-8")
        with pytest.raises(MeasureError, match=message):
            gate(measured=[path, path])


@pytest.mark.parametrize(("form", "indent"), [("list", None), ("one", 2), ("several", 2)])
def test_answers_over_several_lines_say_how_they_are_read(
    form: str, indent: int | None, tmp_path: Path
) -> None:
    own = FOREIGN / "vllm-answers-bf16.jsonl"
    answers = [json.loads(line) for line in own.read_text(encoding="utf-8").splitlines()]
    path = tmp_path / "indented.json"
    text = [json.dumps(one, indent=indent) for one in answers[: 1 if form == "one" else None]]
    path.write_text(json.dumps(answers, indent=indent) if form == "list" else "\n".join(text),
                    encoding="utf-8")  # fmt: skip
    with pytest.raises(MeasureError, match=r"jq -c 'arrays\[\], objects' FILE > FILE.jsonl"):
        gate(measured=[path, path])


def test_compare_reads_them() -> None:
    report = compare(both(REAL["guidellm"]))
    assert any("paired by the prompt" in warning for warning in report.warnings)
    with pytest.raises(CompareError, match="cannot be compared"):
        compare([FOREIGN / "guidellm-bf16.json", FOREIGN / "vllm-answers-int4.jsonl"])


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
        pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
        for key, item in pairs:
            changed, place = mutated(item, place, junk)
            if place < 0:
                copy = value.copy()
                copy[key] = changed
                return copy, -1
    return value, place


JUNK: tuple[tuple[str, Any], ...] = (
    ("guidellm", None), ("answers", []), ("bench", {}), ("aiperf", "x"), ("sglang", -1),
    ("chat", 1.5), ("guidellm", {}), ("answers", None), ("aiperf", True), ("sglang", []),
)  # fmt: skip


def test_junk_at_any_place_is_read_or_refused_never_a_crash(tmp_path: Path) -> None:
    sources = {
        "guidellm": FOREIGN / "guidellm-bf16.json",
        "answers": FOREIGN / "vllm-answers-bf16.jsonl",
        "bench": FOREIGN / "vllm-bench-bf16.json",
        "aiperf": FOREIGN / "aiperf-bf16/profile_export.jsonl",
        "sglang": handmade.sglang(tmp_path / "s.log", "bf16"),
        "chat": handmade.sglang_answers(tmp_path / "c.jsonl", "bf16", "chat"),
    }
    shutil.copy(FOREIGN / "aiperf-bf16/inputs.json", tmp_path / "inputs.json")
    for name, junk in JUNK:
        lines = sources[name].read_text(encoding="utf-8").splitlines()
        first, path = json.loads(lines[0]), tmp_path / "profile_export.jsonl"
        counted, fixes = 0, []
        for place in range(0, 90, 2):
            changed, left = mutated(first, place, junk)
            if left >= 0:
                break
            path.write_text("\n".join([json.dumps(changed), *lines[1:3]]), encoding="utf-8")
            try:
                counted += len(read_foreign(path).requests)
            except MeasureError as exc:
                fixes.append(exc.fix)
        assert all(fixes)
        assert counted or name in ("guidellm", "bench")
