"""Measurements of two servers under the gate: verdicts, what cannot be compared, noise, parity."""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from draftquant.recipes.errors import GateError
from draftquant.validate.judging.advice import Background
from draftquant.validate.judging.judgement import judge
from draftquant.validate.judging.policy import Look
from draftquant.validate.measure.measurement import Measurement
from draftquant.validate.parity.finding import Finding
from draftquant.validate.served.common_steps import num_unwritten
from draftquant.validate.served.joint_report import joint_report
from draftquant.validate.served.served_gate import judge_measured, server_noise
from handmade_measurements import alternating, measurement
from handmade_replays import RELEASE, noisy, replay, spread

A, B = {"draft_sha256": "a" * 64}, {"draft_sha256": "b" * 64}
UNRELATED = Background(unrelated=True)


def run(drop: int = 0, noise: int = 0, count: int = 40, **changes: Any) -> Measurement:
    """K = 1, 200 steps per prompt, of which 80 to 84 and `drop` more accept nothing."""
    rounds = [
        alternating(200, 80 + i % 5 + drop + (noise if i % 2 else -noise)) for i in range(count)
    ]
    return measurement(rounds, **({"name": f"drop {drop}"} | changes))


def thinned(one: Measurement, every: int, most: int = 40) -> Measurement:
    """The same outputs, of which every so-many-th step that accepts nothing is not told."""
    records = []
    for record in one.records[:most]:
        zeros = [i for i, accepted in enumerate(record.accepted or ()) if not accepted]
        left_out = set(zeros[::every])
        kept = tuple(a for i, a in enumerate(record.accepted or ()) if i not in left_out)
        counted = (kept.count(0), kept.count(1))
        records.append(dataclasses.replace(record, accepted=kept, histogram=counted))
    return dataclasses.replace(one, records=(*records, *one.records[most:]))


def untold(one: Measurement) -> Measurement:
    records = tuple(dataclasses.replace(record, accepted=None) for record in one.records)
    return dataclasses.replace(one, records=records)


SHORT = [{"token_ids": (7, 8)}] * 40
COPIES = [{"prompt_sha256": "c" * 64}] * 40
HOT = {"temperature": 1.0}
PLAIN, INT4 = {"draft_quantization": "none"}, {"draft_quantization": "int4-channel-gptq"}
Pair = tuple[Measurement, Measurement]
VERDICTS: dict[str, tuple[Callable[[], Pair], str, str]] = {
    "small loss": (lambda: (run(**A), run(0, 1, **B)), "PASS", ""),
    "large loss": (lambda: (run(**A), run(10, 1, **B)), "FAIL", "larger than the limit"),
    "few prompts": (
        lambda: (run(1, 1, count=20, **A), run(2, 2, count=20, **B)), "INCONCLUSIVE",
        "Measure both servers on",
    ),
    "copies": (
        lambda: (run(of_record=COPIES, **A), run(1, of_record=COPIES, **B)), "INCONCLUSIVE",
        "Judge them: draftquant gate --measured A.jsonl B.jsonl",
    ),
    "broken": (lambda: (run(**A), run(110, **B)), "ANOMALOUS", "no token of the candidate"),
    "gain": (lambda: (run(**A), run(-40, 1, **B)), "ANOMALOUS", "Rounding cannot do that."),
    "a third of the steps untold": (
        lambda: (run(**A), thinned(run(12, 1, **B), 3)), "ANOMALOUS",
        "15.8% of the steps that wrote the outputs of drop 12 are no verify steps",
    ),
    "the same by sums": (
        lambda: (run(**A), untold(thinned(run(12, 1, **B), 3))), "ANOMALOUS", "no verify steps",
    ),
    "all of them told": (lambda: (run(**A), run(12, 1, **B)), "FAIL", ""),
    "half a percent on one side": (
        lambda: (run(**A), thinned(run(1, 1, **B), 9, most=4)), "ANOMALOUS",
        "0.49% of drop 1: one server drafted less often",
    ),
    "and on both": (
        lambda: (thinned(run(**A), 9, most=4), thinned(run(1, 1, **B), 9, most=4)), "PASS", "",
    ),
    "more accepted than written": (
        lambda: (run(of_record=SHORT, **A), run(1, of_record=SHORT, **B)), "ANOMALOUS",
        "The verify steps of drop 0 accept more than its outputs",
    ),
    "another target": (
        lambda: (run(**A), run(0, 1, parts_at=0, **B)), "ANOMALOUS",
        "The two targets differ: greedy outputs diverge at 100.0%",
    ),
    "near ties": (lambda: (run(**A), run(0, 1, parts_at=20, **B)), "PASS", ""),
    "too many ties": (lambda: (run(**A), run(0, 1, parts_at=18, **B)), "ANOMALOUS", "differ"),
    "drawn text": (lambda: (run(**HOT, **A), run(0, 1, parts_at=0, **HOT, **B)), "PASS", ""),
    "nothing but times": (lambda: (run(**A), run(name="again", **B)), "PASS", ""),
    "rounding without effect": (
        lambda: (run(**A, **PLAIN), run(name="wrong", **B, **INT4)), "ANOMALOUS",
        "wrong is declared to be quantized (int4-channel-gptq), but every",
    ),
    "rounding": (lambda: (run(**A, **PLAIN), run(0, 1, **B, **INT4)), "PASS", ""),
    "two plain ones": (lambda: (run(**A, **PLAIN), run(name="x", **B, **PLAIN)), "PASS", ""),
    "transcoded": (lambda: (run(**A, **INT4), run(name="fp8", **B, **INT4)), "PASS", ""),
    "another K": (
        lambda: (run(**A), measurement([[2, 1, 0] * 60] * 40, num_draft_tokens=2, **B)),
        "ANOMALOUS", "The two drafts drafted 1 and 2 tokens per verify step",
    ),
    "other prompts under equal hashes": (
        lambda: (run(**A), dataclasses.replace(run(1, **B), records=run(1, **B).records[::-1])),
        "ANOMALOUS", "hold different prompts",
    ),
}  # fmt: skip


def test_a_verdict_on_two_measurements(subtests: pytest.Subtests) -> None:
    for name in VERDICTS:
        with subtests.test(name):
            runs, verdict, said = VERDICTS[name]
            report = judge_measured(*runs(), RELEASE)
            assert (report.verdict, report.exit_code) == (
                verdict,
                {"PASS": 0, "FAIL": 1}.get(verdict, 3),
            )
            assert said in f"{report.reason}\n{report.action}"
            assert report.background.candidate_sha256 == "b" * 64
            mapping = json.loads(json.dumps(report.to_mapping(), allow_nan=False))
            assert mapping["traces"] is mapping["first_step"] is mapping["draft_sampling"] is None


def test_runs_that_differ_in_what_must_be_alike_are_anomalous(subtests: pytest.Subtests) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"template_sha256": "d" * 64}, "chat template: None, dddd"),
        ({"engine": "sglang"}, "engine: vllm, sglang"),
        ({"version": "0.33.0"}, "engine version: 0.32.0, 0.33.0"),
        ({"model": "other"}, "model: target, other"),
        ({"prompts_sha256": "e" * 64}, "prompts: "),
        ({"temperature": 1.0}, "temperature: 0, 1.0"),
        ({"max_new_tokens": 7}, "tokens asked for: 4000, 7"),
        ({"lossy": ("accept_threshold = 0.9",)}, "not have written (accept_threshold = 0.9)"),
        ({"count": 39}, "prompts: "),
    ]  # fmt: skip
    for changes, message in rows:
        with subtests.test(str((changes, message))):
            report = judge_measured(run(**A), run(1, **(B | changes)), RELEASE)
            assert (report.verdict, report.change, report.categories) == ("ANOMALOUS", None, ())
            assert message in report.reason
            assert (report.action or "").startswith("Measure both drafts on the same prompts")


def without_a_draft() -> Measurement:
    plain = measurement(
        [[0] * 300] * 40, name="plain", of_record=[{"histogram": None, "accepted": None}] * 40
    )
    return dataclasses.replace(plain, setup=dataclasses.replace(plain.setup, speculation=None))


def twice(one: Measurement) -> Pair:
    return one, dataclasses.replace(one, name="copy")


REFUSED: dict[str, tuple[Callable[[], Pair], Background, str]] = {
    "same by times": (
        lambda: (run(), run(name="again")), Background(),
        "has the same outputs and verify steps as drop 0",
    ),
    "same by half": (lambda: (run(**A), run(name="again")), Background(), "has the same outputs"),
    "copy": (
        lambda: twice(run(**A)), Background(),
        "is the same measurement as drop 0: even all times",
    ),
    "one draft": (lambda: (run(**A), run(0, 1, **A)), Background(), "the same draft as drop 0"),
    "another folder": (
        lambda: (run(**A), run(1, **B)),
        Background(baseline_sha256="a" * 64, candidate_sha256="f" * 64),
        "was served with another draft: expected tensors ffff",
    ),
    "short outputs": (
        lambda: (measurement([[1, 0, 1]] * 40, **A), measurement([[1, 0, 1]] * 40, **B)),
        Background(), "measure --max-new-tokens",
    ),
    "no step": (
        lambda: (run(**A), measurement([[]] * 40, name="none", version="0.33.0", **B)),
        Background(), "none: has no verify step: all of its outputs are one token",
    ),
    "no draft": (
        lambda: (without_a_draft(), dataclasses.replace(
            without_a_draft(), records=without_a_draft().records[:1])),
        Background(), "neither it nor plain was measured with a draft",
    ),
}  # fmt: skip


def test_what_is_no_comparison_is_refused(subtests: pytest.Subtests) -> None:
    for name in REFUSED:
        with subtests.test(name):
            runs, background, said = REFUSED[name]
            with pytest.raises(GateError, match=said):
                judge_measured(*runs(), RELEASE, background=background)


def test_what_is_meant_is_compared() -> None:
    wrong = run(name="wrong", **B, **INT4)
    for pair in ((run(**A), run(0, 1, **A)), (run(**A, **PLAIN), wrong)):
        assert judge_measured(*pair, RELEASE, background=UNRELATED).verdict == "PASS"
    known = Background(expected_baseline=1.9)
    other = judge_measured(run(**A), run(1, **B), RELEASE, background=known)
    assert "but --expect-baseline says 1.9" in other.reason
    report = judge_measured(run(**A), without_a_draft(), RELEASE)
    assert "Plain was measured without a draft" in report.reason
    assert report.candidate.mean_acceptance_length == 1


def test_equal_texts_are_judged_as_their_replay_would_be() -> None:
    """Steps that all lie in one text: the same counts, so the same bounds to the last bit."""
    rounds = [[alternating(200, 80 + i % 5 + drop) for i in range(40)] for drop in (0, 3)]
    served = []
    for steps, digest in zip(rounds, (A, B), strict=True):
        one = measurement([[*accepted, 0] for accepted in steps], **digest)
        texts = [tuple(10_000 * i + j for j in range(400)) for i in range(40)]
        filled = [(*accepted, *(0,) * (399 - sum(accepted) - len(accepted))) for accepted in steps]
        records = tuple(
            dataclasses.replace(
                record,
                token_ids=text,
                accepted=accepted,
                histogram=(accepted.count(0), accepted.count(1)),
            )
            for record, text, accepted in zip(one.records, texts, filled, strict=True)
        )
        served.append(dataclasses.replace(one, records=records))
    report = judge_measured(*served, RELEASE)
    # K = 1: the last step drafts the last token of the text, so that all of them count.
    replays = (replay([r.histogram for r in one.records if r.histogram]) for one in served)
    replayed = judge(*replays, RELEASE)
    assert report.served is not None
    assert report.served.identical_share == report.served.common_share == 1
    assert report.baseline.histogram == replayed.baseline.histogram
    assert report.change == replayed.change
    assert (report.verdict, report.reason) == (replayed.verdict, replayed.reason)


def test_what_the_end_of_an_output_leaves_open_is_no_step_without_a_draft() -> None:
    """K tokens beyond it, K written without a draft, and as many by steps that are told in part."""
    text = {"accepted": (1,) * 10, "histogram": (0, 10)}  # 21 tokens, K = 1
    for length, cut, number in ((19, 0, 0), (21, 0, 0), (22, 0, 0), (23, 1, 0), (18, 0, -3),
                                (23, 0, 2), (24, 1, 3)):  # fmt: skip
        ends = {"token_ids": tuple(range(length)), "num_cut_rounds": cut}
        (record,) = measurement([[1] * 10], of_record=[text | ends]).records
        assert num_unwritten(record, 1) == number


def test_servers_that_were_started_differently_are_named() -> None:
    """Other weights of the target are another target, all else is said."""
    told = {"model_config.dtype": "torch.bfloat16", "speculative_config.draft_sample_method": "a"}
    other = {"model_config.dtype": "torch.float16", "speculative_config.draft_sample_method": "b"}
    report = judge_measured(run(arguments=told, **A), run(0, 1, arguments=other, **B), RELEASE)
    assert report.verdict == "PASS"
    (said,) = [w for w in report.warnings if "started differently" in w]
    assert said.endswith("differently (model_config.dtype: torch.bfloat16, torch.float16)")
    nothing = judge_measured(run(arguments=told, **A), run(0, 1, **B), RELEASE)
    assert not [w for w in nothing.warnings if "started differently" in w]
    narrow = told | {"model_config.quantization": "fp8"}
    report = judge_measured(run(arguments=told, **A), run(0, 1, arguments=narrow, **B), RELEASE)
    assert report.verdict == "ANOMALOUS"
    assert "model_config.quantization: None, fp8" in report.reason


def test_categories_and_looks_are_as_for_traces() -> None:
    split = judge_measured(run(categories="ab", **A), run(1, categories="ab", **B), RELEASE)
    assert [found.category for found in split.categories] == ["a", "b"]
    look = Look(number=1, total=2, spending="pocock")
    early = judge_measured(run(**A), run(1, 2, **B), RELEASE, look=look)
    assert early.change is not None
    assert early.served is not None
    assert early.served.whole_change is not None
    assert early.served.whole_change.confidence == early.change.confidence > RELEASE.confidence


def test_what_a_reader_has_to_know() -> None:
    fewer = {"drafted": (*(0,) * 20, *(1,) * 180), "accepted": (*(0,) * 20, *(1,) * 180),
             "histogram": (20, 180)}  # fmt: skip
    one = measurement([[0] * 20 + [1] * 180] * 40, name="one", of_record=[fewer] * 40)
    called = {"draft": "int4", "served_draft": "/draft", "told_by": "user"}
    loop = [{"token_ids": tuple(range(321))}] * 2
    wide = judge_measured(run(**A), untold(run(1, **B)), RELEASE)
    for runs, said in (
        ((one, run(1, concurrency=8, name="two")), "one and two do not record which draft was"),
        ((one, run(1, concurrency=8, name="two")), "1 and 8 requests in flight"),
        ((one, run(1, name="two")), "10.0% of the verify steps of one fewer than K"),
        ((run(**A), run(1, acceptance_told=False, **B)), "of drop 1 does not report its accep"),
        ((run(**A), run(1, 1, **B, **called)), "its draft /draft; only --served-as says that"),
        ((run(of_record=loop, **A), run(1, of_record=loop, **B)), "2 distinct prompts hardly dif"),
        ((run(**A), untold(run(1, **B))), "so whole outputs are compared, with wider bounds"),
    ):  # fmt: skip
        warnings = judge_measured(*runs, RELEASE).warnings
        assert any(said in warning for warning in warnings), said
    assert wide.served is not None
    assert (wide.served.estimator, wide.served.common_change) == ("whole outputs", None)


def test_drawn_text_is_compared_whole_and_known_by_its_probability() -> None:
    drawn = {"temperature": 0.8, "top_p": 0.95, "top_k": 40}
    likely = [{"token_logprob": (math.log(0.5),) * 10}] * 40
    runs = [run(drop, of_record=likely, **drawn, **d) for drop, d in ((0, A), (1, B))]
    report = judge_measured(*runs, RELEASE)
    assert report.estimand.startswith("sampled (temperature 0.8, top-p 0.95, top-k 40) spec")
    assert report.served is not None
    assert report.served.estimator == "whole outputs"
    hard = dataclasses.replace(RELEASE, min_step_acceptance=0.99)  # only half of it is needed here
    assert judge_measured(*runs, hard).verdict == "PASS"
    sure = [run(drop, **drawn, **d) for drop, d in ((0, A), (1, B))]
    assert judge_measured(*sure, hard).verdict == "ANOMALOUS"


# ---- The server's noise, and all judgements together

NOISE: dict[str, tuple[Callable[[], Pair], str, str]] = {
    "small": (lambda: (run(**A), run(0, 1, **A)), "PASS", "smaller than the limit"),
    "none": (lambda: (run(**A), run(**A)), "PASS", "+0.00%"),
    "drift": (lambda: (run(**A), run(4, 1, **A)), "ANOMALOUS", "The server changed between the"),
    "large": (lambda: (run(**A), run(0, 20, **A)), "INCONCLUSIVE", "as large as the limit of 1.00"),
    "few": (lambda: (run(count=1, **A), run(1, count=1, **A)), "INCONCLUSIVE", "too few prompts"),
    "another server": (
        lambda: (run(**A), run(0, 1, version="0.33.0", **A)), "ANOMALOUS",
        "this run does not repeat the first",
    ),
}  # fmt: skip


def test_the_noise_of_a_server(subtests: pytest.Subtests) -> None:
    for name in NOISE:
        with subtests.test(name):
            runs, verdict, said = NOISE[name]
            noise = server_noise(*runs(), RELEASE)
            assert noise.verdict == verdict
            assert said in noise.reason
            assert (noise.change is None) == (name in ("few", "another server"))


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


def finding(**changes: Any) -> Finding:
    made = Finding(
        check="task", what="gsm8k", estimate=-0.1, threshold=None, verdict="INCONCLUSIVE",
        reason="No threshold.",
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def test_the_worst_of_all_counts() -> None:
    passed = judge_measured(run(**A), run(0, 1, **B), RELEASE)
    failed = judge(replay(spread(600)), replay(noisy(64, 4)), RELEASE)
    assert (passed.verdict, failed.verdict) == ("PASS", "FAIL")
    noise = server_noise(run(**A), run(0, 1, **A), RELEASE)
    unsteady = server_noise(run(**A), run(4, 1, **A), RELEASE)
    good = finding(threshold=0.0, verdict="PASS")
    for parts, verdict, code in (
        ({"served": passed, "noise": noise, "parity": (good,)}, "PASS", 0),
        ({"served": passed, "parity": (finding(), good)}, "INCONCLUSIVE", 3),
        ({"served": passed, "parity": (finding(),), "replayed": failed}, "FAIL", 1),
        ({"served": passed, "noise": unsteady, "replayed": failed}, "ANOMALOUS", 3),
        ({"replayed": failed, "parity": (good,)}, "FAIL", 1),
    ):
        joint = joint_report(**parts)  # type: ignore[arg-type]
        assert (joint.verdict, joint.exit_code) == (verdict, code)
        json.dumps(joint.to_mapping(), allow_nan=False)
    action = joint_report(served=passed, noise=unsteady).action
    assert "measure all runs again in turns" in (action or "")


def test_a_replay_beside_it_is_held_against_what_was_served() -> None:
    passed = judge_measured(run(**A), run(0, 1, **B), RELEASE)
    deep = [(300, 300, 400)] * 40
    for drafts, said in (
        ((spread(600), noisy(0, 4)), "the change is +0.00% by replay and"),
        ((spread(600), noisy(0, 4)), "chance explains the difference"),
        ((spread(600), noisy(64, 4)), "chance does not explain the difference"),
        ((spread(600), noisy(64, 4)), "verdicts differ: FAIL by replay, PASS by the servers"),
        ((deep, deep), "the replay used K = 2 and the servers K = 1"),
    ):
        replayed = judge(*map(replay, drafts), RELEASE)
        warnings = joint_report(served=passed, replayed=replayed).warnings
        assert any(said in warning for warning in warnings), said
