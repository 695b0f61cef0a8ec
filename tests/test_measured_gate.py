"""Measurements of two servers under the gate: verdicts, what cannot be compared, noise, parity."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import corpus
import pytest
from draftquant.recipes.errors import GateError
from draftquant.scripts.cli import main
from draftquant.validate.judging.advice import Background
from draftquant.validate.judging.judgement import judge
from draftquant.validate.measure.measurement import Measurement
from draftquant.validate.parity.finding import ParityFinding, write_findings
from draftquant.validate.served import common_steps
from draftquant.validate.served.joint_report import joint_report
from draftquant.validate.served.served_gate import judge_measured, server_noise
from handmade_measurements import alternating, measurement, record, written
from handmade_measurements import losing as run
from handmade_replays import RELEASE, noisy, replay, spread
from handmade_reports import KNOWN, ONE_BY_ONE, jointly, lost

Capsys = pytest.CaptureFixture[str]
A, B = {"draft_sha256": "a" * 64}, {"draft_sha256": "b" * 64}
UNRELATED = Background(unrelated=True)


def thinned(one: Measurement, every: int, most: int = 40) -> Measurement:
    """The same outputs, of which every so-many-th step that accepts nothing is not told."""
    records = []
    for own in one.records[:most]:
        zeros = [i for i, accepted in enumerate(own.accepted or ()) if not accepted]
        left_out = set(zeros[::every])
        kept = tuple(a for i, a in enumerate(own.accepted or ()) if i not in left_out)
        counted = (kept.count(0), kept.count(1))
        records.append(dataclasses.replace(own, accepted=kept, histogram=counted))
    return dataclasses.replace(one, records=(*records, *one.records[most:]))


def untold(one: Measurement) -> Measurement:
    records = tuple(dataclasses.replace(record, accepted=None) for record in one.records)
    return dataclasses.replace(one, records=records)


SHORT = [{"token_ids": (7, 8)}] * 40
COPIES = [{"prompt_sha256": "c" * 64}] * 40
HOT = {"temperature": 1.0}
PLAIN, INT4 = {"draft_quantization": "none"}, {"draft_quantization": "int4-channel-gptq"}
Pair = tuple[Measurement, Measurement]
VERDICTS: dict[str, tuple[Callable[[], Pair], str]] = {
    "small loss": (lambda: (run(**A), run(0, 1, **B)), "PASS"),
    "large loss": (lambda: (run(**A), run(10, 1, **B)), "FAIL"),
    "few prompts": (
        lambda: (run(1, 1, count=20, **A), run(2, 2, count=20, **B)), "INCONCLUSIVE"),
    "copies": (
        lambda: (run(of_record=COPIES, **A), run(1, of_record=COPIES, **B)), "INCONCLUSIVE"),
    "broken": (lambda: (run(**A), run(110, **B)), "ANOMALOUS"),
    "gain": (lambda: (run(**A), run(-40, 1, **B)), "ANOMALOUS"),
    "a third of the steps untold": (
        lambda: (run(**A), thinned(run(12, 1, **B), 3)), "ANOMALOUS"),
    "the same by sums": (lambda: (run(**A), untold(thinned(run(12, 1, **B), 3))), "ANOMALOUS"),
    "all of them told": (lambda: (run(**A), run(12, 1, **B)), "FAIL"),
    "half a percent on one side": (
        lambda: (run(**A), thinned(run(1, 1, **B), 9, most=4)), "ANOMALOUS"),
    "and on the other": (lambda: (thinned(run(**A), 9, most=4), run(1, 1, **B)), "ANOMALOUS"),
    "and on both": (
        lambda: (thinned(run(**A), 9, most=4), thinned(run(1, 1, **B), 9, most=4)), "PASS"),
    "more accepted than written": (
        lambda: (run(of_record=SHORT, **A), run(1, of_record=SHORT, **B)), "ANOMALOUS"),
    "another target": (lambda: (run(**A), run(0, 1, parts_at=0, **B)), "ANOMALOUS"),
    "near ties": (lambda: (run(**A), run(0, 1, parts_at=20, **B)), "PASS"),
    "too many ties": (lambda: (run(**A), run(0, 1, parts_at=18, **B)), "ANOMALOUS"),
    "drawn text": (lambda: (run(**HOT, **A), run(0, 1, parts_at=0, **HOT, **B)), "PASS"),
    "nothing but times": (lambda: (run(**A), run(name="again", **B)), "PASS"),
    "rounding without effect": (
        lambda: (run(**A, **PLAIN), run(name="wrong", **B, **INT4)), "ANOMALOUS"),
    "rounding": (lambda: (run(**A, **PLAIN), run(0, 1, **B, **INT4)), "PASS"),
    "two plain ones": (lambda: (run(**A, **PLAIN), run(name="x", **B, **PLAIN)), "PASS"),
    "transcoded": (lambda: (run(**A, **INT4), run(name="fp8", **B, **INT4)), "PASS"),
    "another K": (
        lambda: (run(**A), measurement([[2, 1, 0] * 60] * 40, num_draft_tokens=2, **B)),
        "ANOMALOUS"),
    "other prompts under equal hashes": (
        lambda: (run(**A), dataclasses.replace(run(1, **B), records=run(1, **B).records[::-1])),
        "ANOMALOUS"),
}  # fmt: skip
"""What each is told is kept in told/measured_gate.txt, as for the tables below."""


def test_a_verdict_on_two_measurements() -> None:
    for name, (runs, verdict) in VERDICTS.items():
        report = judge_measured(*runs(), RELEASE)
        code = {"PASS": 0, "FAIL": 1}.get(verdict, 3)
        assert (name, report.verdict, report.exit_code) == (name, verdict, code)
    mapping = json.loads(json.dumps(report.to_mapping(), allow_nan=False))
    assert mapping["traces"] is mapping["first_step"] is mapping["draft_sampling"] is None


def test_what_was_known_before_reaches_the_report() -> None:
    """By replay and by servers, each thing alone; and of both what a reader must know."""
    replays = replay(spread(600)), replay(noisy(3, 4))
    for known in ONE_BY_ONE:
        assert known != Background(), "give KNOWN a value of each new field"
        assert lost(known, judge(*replays, RELEASE, background=known)) == []
        assert lost(known, jointly((run(**A), run(0, 1, **B)), known)) == []
    other = judge(*replays, RELEASE, background=dataclasses.replace(KNOWN, warnings=("so",)))
    both = jointly((run(**A), run(0, 1, **B)), KNOWN, replayed=other)
    assert {"so", *KNOWN.warnings} <= {*both.warnings}


def test_runs_that_differ_in_what_must_be_alike_are_anomalous() -> None:
    rows: tuple[dict[str, Any], ...] = (
        {"template_sha256": "d" * 64}, {"engine": "sglang"}, {"version": "0.33.0"},
        {"model": "other"}, {"prompts_sha256": "e" * 64}, {"temperature": 1.0},
        {"max_new_tokens": 7}, {"lossy": ("accept_threshold = 0.9",)}, {"count": 39},
    )  # fmt: skip
    for changes in rows:
        report = judge_measured(run(**A), run(1, **(B | changes)), RELEASE)
        assert (report.verdict, report.change, report.categories) == ("ANOMALOUS", None, ())


def without_a_draft() -> Measurement:
    none = {"histogram": None, "accepted": None}
    plain = measurement([[0] * 300] * 40, name="plain", of_record=[none] * 40)
    return dataclasses.replace(plain, setup=dataclasses.replace(plain.setup, speculation=None))


OTHERS = Background(baseline_sha256="a" * 64, candidate_sha256="f" * 64)


def not_compared() -> Iterator[Pair]:
    yield run(), run(name="again")
    yield run(**A), run(name="again")
    one = run(**A)
    yield one, dataclasses.replace(one, name="copy")
    yield one, run(0, 1, **A)
    yield measurement([[1, 0, 1]] * 40, **A), measurement([[1, 0, 1]] * 40, **B)
    yield run(**A), measurement([[]] * 40, name="none", version="0.33.0", **B)
    plain = without_a_draft()
    yield plain, dataclasses.replace(plain, records=plain.records[:1])


def test_what_is_no_comparison_is_refused_and_what_is_meant_is_compared() -> None:
    for runs in not_compared():
        with pytest.raises(GateError):
            judge_measured(*runs, RELEASE)
    with pytest.raises(GateError, match="was served with another draft: expected tensors ffff"):
        judge_measured(run(**A), run(1, **B), RELEASE, background=OTHERS)
    for pair in ((run(**A), run(0, 1, **A)), (run(**A, **PLAIN), run(name="wrong", **B, **INT4))):
        assert judge_measured(*pair, RELEASE, background=UNRELATED).verdict == "PASS"
    judge_measured(run(**A), run(1, **B), RELEASE, background=Background(expected_baseline=1.9))
    report = judge_measured(run(**A), without_a_draft(), RELEASE)
    assert report.candidate.mean_acceptance_length == 1


def test_equal_texts_are_judged_as_their_replay_would_be() -> None:
    """Steps that all lie in one text: the same counts, so the same bounds to the last bit."""
    served = []
    for drop, digest in ((0, A), (3, B)):
        rounds, told = [alternating(80 + i % 5 + drop) for i in range(40)], []
        for i, steps in enumerate(rounds):
            filled = (*steps, *(0,) * (399 - sum(steps) - len(steps)))
            counted = (filled.count(0), filled.count(1))
            text = tuple(10_000 * i + j for j in range(400))
            told.append({"token_ids": text, "accepted": filled, "histogram": counted})
        served.append(measurement(rounds, of_record=told, **digest))
        served[-1] = dataclasses.replace(served[-1], records=(
            dataclasses.replace(served[-1].records[0], token_ids=(7,) * 400),
            *served[-1].records[1:],
        ))  # fmt: skip
    report = judge_measured(*served, RELEASE)
    assert {p.repeated_8gram_share for p in report.prompts[1:]} == {0}
    assert report.prompts[0].repeated_8gram_share == 1 - 1 / 393
    # K = 1: the last step drafts the last token of the text, so that all of them count.
    replays = (replay([r.histogram for r in one.records if r.histogram]) for one in served)
    replayed = judge(*replays, RELEASE)
    assert report.served is not None
    assert report.served.identical_share == report.served.common_share == 1
    assert report.baseline.histogram == replayed.baseline.histogram
    assert report.change == replayed.change
    assert (report.verdict, report.reason) == (replayed.verdict, replayed.reason)


def pair_of(
    baseline: list[int], candidate: list[int], **candidates: Any
) -> common_steps.PairedOutputs:
    one, other = (record(steps, num_draft_tokens=2) for steps in (baseline, candidate))
    return common_steps.pair_outputs(one, dataclasses.replace(other, **candidates), 2, greedy=True)


def test_rounds_of_equal_outputs_are_counted_by_the_rule_of_replay() -> None:
    """Rounds behind 1, 4, 5, 8 tokens of 9: what the last one drafts reaches behind the end."""
    text = record([2, 0, 2, 0], num_draft_tokens=2).token_ids
    pair = pair_of([2, 0, 2, 0], [0, 1, 2, 0, 0], token_ids=text)
    assert (pair.identical, pair.baseline.rest.histogram) == (True, (1, 0, 0))
    own, other = pair.weighted()
    assert own.histogram == (1, 0, 2)  # 8 + 2 > 9
    assert other.histogram == (2, 1, 1)  # behind 1, 2, 4, 7 tokens; that behind 8 is not
    pair = pair_of([2, 0, 1], [2, 0, 1], accepted=None)  # they have no place
    assert (pair.placed, pair.baseline.common.num_steps) == (False, 0)


def test_weights_are_those_of_places_by_hand() -> None:
    """12 tokens each, 8 common: n = 10 rows, c = 6 of them common, r = 4."""
    text = record([2, 2, 1, 2], num_draft_tokens=2).token_ids
    pair = pair_of([2, 2, 1, 2], [2, 0, 1, 0, 2, 0], token_ids=(*text[:8], *range(900, 904)))
    assert (pair.num_common, pair.identical, pair.placed) == (8, False, True)
    assert pair.baseline.common.histogram == (0, 0, 2)  # behind 1 and 4
    assert pair.candidate.common.histogram == (1, 1, 1)  # behind 1, 4, 5
    divisor = 6 + common_steps.PAIRED_NOISE * 4
    common, rest = 1 + 4 / divisor, 1 - 6 / divisor
    own, other = pair.weighted()
    assert own.histogram == pytest.approx((0, rest, 2 * common + rest))
    assert other.histogram == pytest.approx((common + 2 * rest, common, common + rest))


def test_a_context_bin_begins_with_the_token_of_prefill() -> None:
    """1,023 tokens of the prompt and the one that prefill wrote: all steps begin beyond 1k."""
    one, other = (
        dataclasses.replace(record(steps, num_draft_tokens=2), num_prompt_tokens=1023)
        for steps in ([2, 0, 2, 0], [2, 0, 2, 0])
    )
    pair = common_steps.pair_outputs(one, other, 2, greedy=True)
    assert pair.contexts is not None
    for side in pair.contexts:
        assert [bool(own.num_steps) for own in side.counts] == [False, True, False, False, False]


def test_rounds_have_places_where_they_wrote_the_output() -> None:
    """vLLM counts what a last round accepted beyond the end; TensorRT-LLM leaves that round out."""
    one = record([2, 0, 2], num_draft_tokens=2)  # writes tokens 1 .. 7
    left_out: dict[str, Any] = {"accepted": (2, 0)}
    for changes, starts in (
        ({}, [1, 4, 5]), ({"accepted": ()}, None), ({"token_ids": one.token_ids[:4]}, None),
        ({"token_ids": one.token_ids[:6]}, [1, 4, 5]),
        (left_out | {"token_ids": one.token_ids[:7]}, None),
        (left_out | {"token_ids": one.token_ids[:7], "num_cut_rounds": 1}, [1, 4]),
        (left_out | {"num_cut_rounds": 1}, None),  # 3 tokens; cut rounds have at most K
    ):  # fmt: skip
        assert common_steps.step_starts(dataclasses.replace(one, **changes), 2) == starts
    for cut, unwritten in ((0, 3), (1, 0)):  # K without a draft at the end, and K of a cut round
        longer = dataclasses.replace(one, token_ids=tuple(range(11)), num_cut_rounds=cut)
        assert common_steps.num_unwritten(longer, 2) == unwritten


TOLD = {"model_config.dtype": "torch.bfloat16", "speculative_config.draft_sample_method": "a"}


def test_servers_that_were_started_differently_are_named() -> None:
    """Other weights of the target are another target, all else is said."""
    of_the_draft = ("speculative_num_steps", "draft_dtype", "system_fingerprint")
    told = TOLD | dict.fromkeys(of_the_draft, "a")
    other = {"model_config.dtype": "torch.float16", **dict.fromkeys(of_the_draft, "b")}
    report = judge_measured(run(arguments=told, **A), run(0, 1, arguments=other, **B), RELEASE)
    assert report.verdict == "PASS"
    nothing = judge_measured(run(arguments=TOLD, **A), run(0, 1, **B), RELEASE)
    assert not [w for w in nothing.warnings if "started differently" in w]
    narrow = TOLD | {"model_config.quantization": "fp8"}
    report = judge_measured(run(arguments=TOLD, **A), run(0, 1, arguments=narrow, **B), RELEASE)
    assert report.verdict == "ANOMALOUS"


NEWER: dict[str, Any] = {"version": "0.33.0", "arguments": TOLD | {
    "speculative_config.draft_sample_method": "b", "system_fingerprint": "f"}} | A  # fmt: skip
NARROW = {"arguments": TOLD | {"cache_config.cache_dtype": "fp8"}} | A
SERVERS: dict[str, tuple[Callable[[], Measurement], str]] = {
    "a changed default": (lambda: run(10, 1, **NEWER), "FAIL"),
    "nothing lost": (lambda: run(0, 1, **NEWER), "PASS"),
    "a gain": (lambda: run(-40, 1, **NEWER), "PASS"),
    "broken": (lambda: run(110, **NEWER), "ANOMALOUS"),
    "another K": (
        lambda: measurement([[2, 1, 0] * 60] * 40, num_draft_tokens=2, **NEWER), "ANOMALOUS"),
    "other prompts": (lambda: run(0, 1, count=39, **NEWER), "ANOMALOUS"),
    "another target": (lambda: run(0, 1, parts_at=18, **NEWER), "ANOMALOUS"),
    "another precision": (lambda: run(0, 1, parts_at=18, **NARROW), "PASS"),
    "no precision parts so soon": (lambda: run(0, 1, parts_at=2, **NARROW), "ANOMALOUS"),
    "another engine": (lambda: run(10, 1, **(NEWER | {"engine": "sglang"})), "FAIL"),
}  # fmt: skip


def test_one_draft_on_two_servers_says_what_their_difference_costs(tmp_path: Path) -> None:
    old = run(name="old", arguments=TOLD, **A)
    for name, (new, verdict) in SERVERS.items():
        report = judge_measured(old, new(), RELEASE)
        assert (name, report.verdict, report.background.unrelated) == (name, verdict, False)
    again = judge_measured(old, run(0, 1, arguments=TOLD, **A), RELEASE, background=UNRELATED)
    assert again.served is not None
    assert again.served.apart == ("nothing that the servers report",)
    files = [str(written(tmp_path / n, r)) for n, r in (("old", old), ("new", run(10, 1, **NEWER)))]
    pages = {kind: tmp_path / f"r.{kind}" for kind in ("json", "html", "md")}
    options = [f"--{name}={pages[kind]}" for name, kind in
               (("report", "json"), ("html", "html"), ("markdown", "md"))]  # fmt: skip
    assert main(["gate", "--measured", *files, *options]) == 1
    assert main(["report", str(pages["json"]), f"--junit={tmp_path / 'j.xml'}"]) == 0
    shown = " ".join(re.sub("<[^>]+>", "", pages["html"].read_text(encoding="utf-8")).split())
    assert "Is new (vllm 0.33.0) accepted as often as old (vllm 0.32.0)?" in shown
    assert "| on the first | on the second |" in pages["md"].read_text(encoding="utf-8")


def test_what_a_reader_has_to_know() -> None:
    fewer = {"drafted": (*(0,) * 20, *(1,) * 180), "accepted": (*(0,) * 20, *(1,) * 180),
             "histogram": (20, 180)}  # fmt: skip
    one = measurement([[0] * 20 + [1] * 180] * 40, name="one", of_record=[fewer] * 40)
    called = {"draft": "int4", "served_draft": "/draft", "told_by": "user"}
    loop = [{"token_ids": tuple(range(321))}] * 2
    for runs in (
        (one, run(1, concurrency=8, name="two")),
        (run(**A), run(1, acceptance_told=False, **B)),
        (run(**A), run(1, 1, **B, **called)),
        (run(of_record=loop, **A), run(1, of_record=loop, **B)),
        (run(**A), untold(run(1, **B))),
    ):
        assert judge_measured(*runs, RELEASE).warnings


# ---- The server's noise, and all judgements together


def test_a_drift_is_what_chance_does_in_less_than_one_of_a_hundred_runs() -> None:
    """Beyond the policy's 95 % bounds a sound server is once in ten runs: that is noise."""
    policy = dataclasses.replace(RELEASE, max_relative_drop=0.2)
    noise = server_noise(run(**A), run(3, 8, **A), policy)
    assert noise.change is not None
    assert noise.drift is not None
    assert not noise.change.lower <= 0 <= noise.change.upper
    assert noise.drift.lower <= 0 <= noise.drift.upper
    assert (noise.verdict, noise.drift.confidence) == ("PASS", 0.995)
    with pytest.raises(GateError, match="measured another draft than drop 0, whose noise"):
        server_noise(run(**A), run(0, 1, **B), RELEASE)


def test_the_worst_of_all_counts() -> None:
    passed = judge_measured(run(**A), run(0, 1, **B), RELEASE)
    failed = judge(replay(spread(600)), replay(noisy(64, 4)), RELEASE)
    assert (passed.verdict, failed.verdict) == ("PASS", "FAIL")
    noise = server_noise(run(**A), run(0, 1, **A), RELEASE)
    unsteady = server_noise(run(**A), run(4, 1, **A), RELEASE)
    found = ParityFinding(check="task", what="gsm8k", estimate=-0.1, threshold=None,
                    verdict="INCONCLUSIVE", reason="No threshold.")  # fmt: skip
    good = dataclasses.replace(found, threshold=0.0, verdict="PASS")
    for parts, verdict, code in (
        ({"served": passed, "noise": noise, "parity": (good,)}, "PASS", 0),
        ({"served": passed, "parity": (found, good)}, "INCONCLUSIVE", 3),
        ({"served": passed, "parity": (found,), "replayed": failed}, "FAIL", 1),
        ({"served": passed, "noise": unsteady, "replayed": failed}, "ANOMALOUS", 3),
        ({"replayed": failed, "parity": (good,)}, "FAIL", 1),
    ):
        joint = joint_report(**parts)  # type: ignore[arg-type]
        assert (joint.verdict, joint.exit_code) == (verdict, code)
        json.dumps(joint.to_mapping(), allow_nan=False)
    joint_report(served=passed, noise=unsteady)


def test_a_replay_beside_it_is_held_against_what_was_served() -> None:
    passed = judge_measured(run(**A), run(0, 1, **B), RELEASE)
    deep = [(300, 300, 400)] * 40
    for drafts in ((spread(600), noisy(0, 4)), (spread(600), noisy(64, 4)), (deep, deep)):
        assert joint_report(served=passed, replayed=judge(*map(replay, drafts), RELEASE)).warnings


def test_servers_and_replay_verify_drawn_proposals_by_one_rule() -> None:
    drawn = {"temperature": 1.0, "verification": "block"}
    runs = run(**A, **drawn), run(0, 1, **B, **drawn)
    other = run(0, 1, **B, **(drawn | {"verification": "standard"}))
    assert "verification: block, standard" in judge_measured(runs[0], other, RELEASE).reason
    served = judge_measured(*runs, RELEASE)
    replayed = judge(replay(spread(600)), replay(noisy(0, 4)), RELEASE)
    for how, said in (("probabilistic", "--draft-sampling block"), ("block", ""), ("greedy", "")):
        own = dataclasses.replace(replayed, draft_sampling=how)  # type: ignore[arg-type]
        found = [action for title, *_, action in joint_report(served=served, replayed=own).parts
                 if title == "verification"]  # fmt: skip
        assert bool(found) == bool(said)
        assert said in (found[0] if found else "")


# ---- on the command line


def write(path: Path, drop: int = 0, **changes: Any) -> str:
    return str(written(path, run(drop, **({"name": path.name} | changes))))


def test_two_runs_are_judged_without_traces_or_drafts(tmp_path: Path, capsys: Capsys) -> None:
    gate = ["gate", "--measured", write(tmp_path / "a", **A), write(tmp_path / "b", 1)]
    assert main(gate) == 0
    shown = capsys.readouterr().out
    assert main([*gate, "--max-relative-drop", "0.001"]) == 1
    capsys.readouterr()
    changes = []
    for look in ([], ["--look", "1/2"], ["--look", "1/2", "--spending", "pocock"]):
        assert main([*gate, "--json", *look]) == 0
        told = json.loads(capsys.readouterr().out)
        changes.append(told["change"]["confidence"])
        assert told["served"]["whole_change"]["confidence"] == changes[-1]
    assert changes[0] == 0.95 < changes[2] < changes[1]
    for name, key in (("whole outputs", "whole_change"), ("identical text only", "common_change")):
        assert f"by {name}: {math.expm1(told['served'][key]['log_ratio']):+.2%}, bounds" in shown
    assert told["look"] == {"number": 1, "total": 2, "spending": "pocock"}
    (tmp_path / "a").write_text("".join((tmp_path / "a").read_text("utf-8").splitlines(True)[:-1]))
    assert main(gate) == 2
    assert str(tmp_path / "a") in capsys.readouterr().err


def test_every_category_passes_only_where_that_is_asked(tmp_path: Path) -> None:
    """Category b is open: half of it loses, -3.3 % with bounds -4.3 and -2.3 %, limit -3 %."""
    lost = [alternating(80 + i % 5 + 20 * (i % 4 == 3)) for i in range(64)]
    written(tmp_path / "b", measurement(lost, name="b", categories="ab"))
    baseline = write(tmp_path / "a", count=64, categories="ab")
    gate = ["gate", "--measured", baseline, str(tmp_path / "b"), "--max-relative-drop", "0.029"]
    assert main(gate) == 0
    assert main([*gate, "--every-category-passes"]) == 3


def test_noise_parity_and_a_replay_enter_the_verdict(tmp_path: Path) -> None:
    runs = ["--measured", write(tmp_path / "a"), write(tmp_path / "b", 1)]
    again = ["--baseline-again", write(tmp_path / "again")]
    assert main(["gate", *runs, *again]) == 0
    assert main(["gate", *runs, "--baseline-again", write(tmp_path / "other", 8)]) == 3
    found = ParityFinding(check="task", what="gsm8k", estimate=-0.2, threshold=-0.02,
                          verdict="FAIL", reason="Too much was lost.")  # fmt: skip
    write_findings(tmp_path / "parity.json", [found], drafts_sha256=())
    parity = ["--parity", str(tmp_path / "parity.json"), "--json"]
    assert main(["gate", *runs, *parity]) == 1
    assert main(["gate", *runs, *again, *parity]) == 1
    int4 = corpus.quantized("eagle3-llama", "int4-channel", pair=True)
    drafts = [str(corpus.PAIRS / "eagle3-llama" / "draft"), str(int4)]
    traces = ["--traces", str(corpus.traces("eagle3-llama")), "--min-prompts", "2"]
    assert main(["gate", *drafts, *traces, *runs, "--json"]) in (0, 1, 3)
