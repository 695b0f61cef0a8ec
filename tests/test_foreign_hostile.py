"""Files of other tools as unlucky and hostile users give them: cut, doubled, cancelled, huge."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import handmade_foreign as handmade
import pytest
from draftquant.api import compare, gate
from draftquant.recipes.errors import CompareError, MeasureError
from draftquant.validate.foreign.foreign_formats import read_foreign
from draftquant.validate.foreign.foreign_measurement import ForeignMeasurement, ForeignPair
from draftquant.validate.judging.policy import Policy
from draftquant.validate.served.foreign_gate import judge_foreign
from handmade_foreign import FOREIGN

ANSWERS = FOREIGN / "vllm-answers-bf16.jsonl"
OTHERS = FOREIGN / "vllm-answers-int4.jsonl"
Change = Callable[[list[dict[str, Any]]], object]


def changed(path: Path, place: Path, change: Change) -> Path:
    """A copy of JSON lines after a change of the records."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    change(lines)
    place.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return place


def aiperf(folder: Path) -> Path:
    return Path(shutil.copytree(FOREIGN / "aiperf-int4", folder)) / "profile_export.jsonl"


def document(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    change(found)
    path.write_text(json.dumps(found), encoding="utf-8")


def clusters(run: ForeignMeasurement) -> int:
    return len({request.prompt.counted_with for request in run.requests})


def test_what_windows_and_editors_put_in_front_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    for before in (b"\xef\xbb\xbf", b"\n", b"\r\n\xef\xbb\xbf"):
        path.write_bytes(before + ANSWERS.read_bytes().replace(b"\n", b"\r\n"))
        assert read_foreign(path).requests == read_foreign(ANSWERS).requests
    path.write_bytes(b"")
    with pytest.raises(MeasureError, match=r"docs/servers\.md"):
        gate(measured=[ANSWERS, path])


ABORTED = {"type": "abort", "message": "client went away"}
CUT: dict[str, tuple[str, Change, str]] = {
    "aborted": ("answers", lambda lines: lines[1]["choices"][0].update(finish_reason="abort"),
                "jsonl:2: finish_reason: .*abort"),
    "failed": ("answers", lambda lines: lines.append({"error": {"message": "out of memory"}}),
               "the request failed: .*out of memory"),
    "cancelled": ("aiperf", lambda lines: lines[2]["metadata"].update(was_cancelled=True),
                  ":3: was_cancelled"),
    "aborted by SGLang": ("sglang", lambda lines: lines[0].update(finish_reason=ABORTED),
                          "client went away"),
}  # fmt: skip


def test_a_request_that_was_cut_is_refused(tmp_path: Path) -> None:
    sources = {
        "answers": ANSWERS,
        "aiperf": aiperf(tmp_path / "a"),
        "sglang": handmade.sglang(tmp_path / "s.log", "bf16"),
    }
    for kind, change, said in CUT.values():
        place = tmp_path / "cut.jsonl" if kind == "answers" else sources[kind]
        with pytest.raises(MeasureError, match=said):
            read_foreign(changed(sources[kind], place, change))


def test_no_k_is_so_large_that_reading_takes_for_ever(tmp_path: Path) -> None:
    huge = 10**12
    one = aiperf(tmp_path / "a")
    changed(one, one, lambda lines: lines[0]["spec_decode_acceptance"].update(num_spec_tokens=huge))
    two = handmade.sglang(tmp_path / "s.log", "bf16")
    changed(
        two,
        two,
        lambda lines: lines[0].update(spec_num_proposed_drafts=lines[0]["spec_verify_ct"] * huge),
    )
    for path in (one, two):
        with pytest.raises(MeasureError, match="expected 1 to 1,024 drafted tokens"):
            read_foreign(path)


def test_odd_values_beside_the_counts_are_no_crash(tmp_path: Path) -> None:
    path = aiperf(tmp_path / "a")
    summary = path.with_name("profile_export_aiperf.json")
    document(summary, lambda found: found["input_config"].update(models={"items": 5}))
    assert read_foreign(path).model == ""
    packet = {"name": "data", "value": json.dumps({"choices": [{"delta": "x"}]})}
    raw = path.with_name("profile_export_raw.jsonl")
    changed(raw, raw, lambda lines: lines[0].update(responses=[{"packets": [packet]}]))
    with pytest.raises(MeasureError, match="delta: expected an object"):
        read_foreign(path)


def test_copies_under_many_ids_are_one_cluster(tmp_path: Path) -> None:
    def copied(lines: list[dict[str, Any]]) -> None:
        lines[:] = [{**lines[3], "id": f"q{place}"} for place in range(9)]

    path = handmade.sglang(tmp_path / "s.log", "bf16")
    assert clusters(read_foreign(changed(path, path, copied))) == 1


def test_copies_are_one_cluster_where_no_prompt_is_kept(tmp_path: Path) -> None:
    serve = tmp_path / "v.json"
    shutil.copy(FOREIGN / "vllm-bench-bf16.json", serve)
    assert clusters(read_foreign(serve)) == 12
    document(serve, lambda found: found.update(generated_texts=[found["generated_texts"][0]] * 12))
    assert clusters(read_foreign(serve)) == 1

    def named(lines: list[dict[str, Any]]) -> None:
        body = lines[0]
        del body["choices"][0]["prompt_token_ids"]
        answer = {"error": None, "response": {"status_code": 200, "body": body}}
        lines[:] = [{"custom_id": f"c{place}", **answer} for place in range(9)]

    assert clusters(read_foreign(changed(ANSWERS, tmp_path / "n.jsonl", named))) == 1


def test_sampled_runs_of_a_target_that_nobody_names_do_not_pass(tmp_path: Path) -> None:
    def drawn(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            asked = json.loads(line["request_parameters"])
            asked["sampling_params"]["temperature"] = 0.7
            line["request_parameters"] = json.dumps(asked)

    runs = []
    for name in ("bf16", "int4"):
        path = handmade.sglang(tmp_path / f"{name}.log", name)
        runs.append(read_foreign(changed(path, path, drawn)))
    policy = Policy(name="custom", max_relative_drop=0.5, min_prompts=2)
    report = judge_foreign(ForeignPair(baseline=runs[0], candidate=runs[1]), policy)
    assert report.verdict == "INCONCLUSIVE"
    assert any("does not name it" in what for what in report.background.not_compared)


def left_out(lines: list[dict[str, Any]]) -> None:
    """Verify steps that accepted nothing are not told, as some engines do under load."""
    for line in lines:
        told = line["metrics"]["speculative_decoding"]
        told["num_spec_steps"] -= told["acceptance_histogram"][0]
        told["acceptance_histogram"][0] = 0
        told["per_step_accepted"] = None


def rewritten(lines: list[dict[str, Any]]) -> None:
    for place, line in enumerate(lines):
        line["choices"][0]["text"] = f"another target {place}"


@pytest.mark.parametrize(
    ("change", "said"), [(left_out, "are no verify steps"), (rewritten, "the two targets differ")]
)
def test_compare_refuses_what_the_gate_calls_anomalous(
    change: Change, said: str, tmp_path: Path
) -> None:
    with pytest.raises(CompareError, match=said):
        compare([ANSWERS, changed(OTHERS, tmp_path / "o.jsonl", change)])
