"""Measurements of two servers under the gate: verdicts, what cannot be compared, noise, parity."""

import dataclasses
import json
import math
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


def run(drop: int = 0, noise: int = 0, count: int = 40, **changes: Any) -> Measurement:
    """K = 1, 200 rounds per prompt, of which 80 to 84 and `drop` more accept nothing."""
    rounds = [
        alternating(200, 80 + i % 5 + drop + (noise if i % 2 else -noise)) for i in range(count)
    ]
    return measurement(rounds, **({"name": f"drop {drop}"} | changes))


def test_a_small_loss_passes_and_a_large_one_fails() -> None:
    passed = judge_measured(run(**A), run(0, 1, **B), RELEASE)
    assert (passed.verdict, passed.exit_code) == ("PASS", 0)
    assert passed.background.baseline_sha256 == "a" * 64
    assert passed.background.candidate_sha256 == "b" * 64
    failed = judge_measured(run(**A), run(10, 1, **B), RELEASE)
    assert (failed.verdict, failed.exit_code) == ("FAIL", 1)
    assert failed.estimand == "greedy speculative decoding by vllm 0.32.0"


def test_equal_texts_are_judged_as_their_replay_would_be() -> None:
    """Rounds that all lie in one text: the same counts, so the same bounds to the last bit."""
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
    # K = 1: the last round drafts the last token of the text, so that all of them count.
    histograms = [[r.histogram for r in one.records if r.histogram] for one in served]
    replayed = judge(replay(histograms[0]), replay(histograms[1]), RELEASE)
    assert report.served is not None
    assert report.served.identical_share == report.served.common_share == 1
    assert report.baseline.histogram == replayed.baseline.histogram
    assert report.change == replayed.change
    assert (report.verdict, report.reason) == (replayed.verdict, replayed.reason)


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


@pytest.mark.parametrize("told", [True, False])
def test_steps_that_are_not_told_make_no_draft_better(told: bool) -> None:
    """A third of the steps that accept nothing is left out: what was lost looks like a gain."""
    lossy = run(12, 1, **B)
    assert judge_measured(run(**A), lossy, RELEASE).verdict == "FAIL"
    hidden = thinned(lossy, 3)
    if not told:
        untold = [dataclasses.replace(record, accepted=None) for record in hidden.records]
        hidden = dataclasses.replace(hidden, records=tuple(untold))
    report = judge_measured(run(**A), hidden, RELEASE)
    assert (report.verdict, report.exit_code) == ("ANOMALOUS", 3)
    assert (
        "15.8% of the steps that wrote the outputs of drop 12 are no verify steps" in report.reason
    )


def test_one_side_that_drafts_less_often_is_anomalous() -> None:
    """Half a percent is little enough on both sides, and too much on one."""
    few = thinned(run(1, 1, **B), 9, most=4)
    report = judge_measured(run(**A), few, RELEASE)
    assert report.verdict == "ANOMALOUS"
    assert "0.49% of drop 1: one server drafted less often" in report.reason
    both = judge_measured(thinned(run(**A), 9, most=4), few, RELEASE)
    assert both.verdict == "PASS"


def test_more_accepted_tokens_than_text_are_anomalous() -> None:
    short = [{"token_ids": (7, 8)}] * 40
    report = judge_measured(run(of_record=short, **A), run(1, of_record=short, **B), RELEASE)
    assert report.verdict == "ANOMALOUS"
    assert "the verify steps of drop 0 accept more than its outputs" in report.reason.lower()


def test_what_the_end_of_an_output_leaves_open_is_no_step_without_a_draft() -> None:
    """K tokens beyond it, K written without a draft, and as many by steps that are told in part."""
    text = {"accepted": (1,) * 10, "histogram": (0, 10)}  # 21 tokens, K = 1
    for length, cut in ((19, 0), (20, 0), (21, 0), (22, 0), (23, 1)):
        ends = {"token_ids": tuple(range(length)), "num_cut_rounds": cut}
        (record,) = measurement([[1] * 10], of_record=[text | ends]).records
        assert num_unwritten(record, 1) == 0
    for length, cut, number in ((18, 0, -3), (23, 0, 2), (24, 1, 3)):
        ends = {"token_ids": tuple(range(length)), "num_cut_rounds": cut}
        (record,) = measurement([[1] * 10], of_record=[text | ends]).records
        assert num_unwritten(record, 1) == number


def test_another_target_of_the_same_name_is_anomalous() -> None:
    """At temperature 0 it says something else at once; near ties part one token of hundreds."""
    report = judge_measured(run(**A), run(0, 1, parts_at=0, **B), RELEASE)
    assert report.verdict == "ANOMALOUS"
    assert "the two targets differ: greedy outputs diverge at 100.0%" in report.reason.lower()
    assert report.served is not None
    assert report.served.common_share == 0
    assert judge_measured(run(**A), run(0, 1, parts_at=20, **B), RELEASE).verdict == "PASS"
    assert judge_measured(run(**A), run(0, 1, parts_at=18, **B), RELEASE).verdict == "ANOMALOUS"
    drawn = {"temperature": 1.0}
    assert (
        judge_measured(run(**drawn, **A), run(0, 1, parts_at=0, **drawn, **B), RELEASE).verdict
        == "PASS"
    )


def test_servers_that_were_started_differently_are_named() -> None:
    """Other weights of the target are another target, all else is said."""
    told = {"model_config.dtype": "torch.bfloat16", "speculative_config.draft_sample_method": "a"}
    other = {"model_config.dtype": "torch.float16", "speculative_config.draft_sample_method": "b"}
    report = judge_measured(run(arguments=told, **A), run(0, 1, arguments=other, **B), RELEASE)
    assert report.verdict == "PASS"
    (said,) = [w for w in report.warnings if "started differently" in w]
    assert said.endswith("differently (model_config.dtype: torch.bfloat16, torch.float16)")
    untold = judge_measured(run(arguments=told, **A), run(0, 1, **B), RELEASE)
    assert not [w for w in untold.warnings if "started differently" in w]
    narrow = told | {"model_config.quantization": "fp8"}
    report = judge_measured(run(arguments=told, **A), run(0, 1, arguments=narrow, **B), RELEASE)
    assert report.verdict == "ANOMALOUS"
    assert "model_config.quantization: None, fp8" in report.reason


def test_what_only_the_user_says_of_a_draft_is_said() -> None:
    called = {"draft": "int4", "served_draft": "/draft", "told_by": "user"}
    report = judge_measured(run(**A), run(1, 1, **B, **called), RELEASE)
    (said,) = [warning for warning in report.warnings if "--served-as" in warning]
    assert said == (
        "the server of drop 1 calls its draft /draft; only --served-as says that this is int4"
    )


def test_the_same_run_with_other_times_is_no_comparison() -> None:
    """Unless hashes say that two drafts were served: then it is for the verdict to doubt it."""
    for digests in (({}, {}), (A, {}), ({}, B)):
        with pytest.raises(GateError, match="has the same outputs and verify steps as drop 0"):
            judge_measured(run(**digests[0]), run(name="again", **digests[1]), RELEASE)
    assert judge_measured(run(**A), run(name="again", **B), RELEASE).verdict == "PASS"


def test_rounding_that_changes_no_verify_step_is_anomalous() -> None:
    plain, int4 = {"draft_quantization": "none"}, {"draft_quantization": "int4-channel-gptq"}
    baseline = run(**A, **plain)
    report = judge_measured(baseline, run(name="wrong", **B, **int4), RELEASE)
    assert (report.verdict, report.exit_code) == ("ANOMALOUS", 3)
    assert "wrong is declared to be quantized (int4-channel-gptq), but every" in report.reason
    assert report.action is not None
    assert report.action.startswith("Check which draft the candidate's server runs")
    for candidate in (run(0, 1, **B, **int4), run(name="alike", **B, **plain)):
        assert judge_measured(baseline, candidate, RELEASE).verdict == "PASS"
    transcoded = judge_measured(run(**A, **int4), run(name="fp8", **B, **int4), RELEASE)
    assert transcoded.verdict == "PASS"
    meant = Background(unrelated=True)
    wrong = run(name="wrong", **B, **int4)
    assert judge_measured(baseline, wrong, RELEASE, background=meant).verdict == "PASS"


def test_copies_and_categories_and_looks_are_as_for_traces() -> None:
    copies = [{"prompt_sha256": "c" * 64}] * 40
    report = judge_measured(run(of_record=copies, **A), run(1, of_record=copies, **B), RELEASE)
    assert (report.num_prompts, report.num_copies) == (1, 39)
    assert report.verdict == "INCONCLUSIVE"
    assert (report.action or "").splitlines() == [
        "Measure both servers on 60 fresh prompts or more: draftquant measure --server URL --engine"
        " ENGINE --prompts PROMPTS --out A.jsonl",
        "Judge them: draftquant gate --measured A.jsonl B.jsonl",
    ]
    split = judge_measured(run(categories="ab", **A), run(1, categories="ab", **B), RELEASE)
    assert [found.category for found in split.categories] == ["a", "b"]
    look = Look(number=1, total=2, spending="pocock")
    early = judge_measured(run(**A), run(1, 2, **B), RELEASE, look=look)
    assert early.change is not None
    assert early.change.confidence > RELEASE.confidence
    assert early.served is not None
    assert early.served.whole_change is not None
    assert early.served.whole_change.confidence == early.change.confidence


def test_too_few_prompts_ask_to_measure_more() -> None:
    report = judge_measured(run(1, 1, count=20, **A), run(2, 2, count=20, **B), RELEASE)
    assert report.verdict == "INCONCLUSIVE"
    assert report.action is not None
    assert "Measure both servers on" in report.action


def test_a_broken_draft_and_an_implausible_gain_are_anomalous() -> None:
    broken = judge_measured(run(**A), run(110, **B), RELEASE)
    assert "Almost no token of the candidate is accepted" in broken.reason
    gain = judge_measured(run(**A), run(-40, 1, **B), RELEASE)
    assert "above its baseline's. Rounding cannot do that." in gain.reason
    assert {broken.verdict, gain.verdict} == {"ANOMALOUS"}
    known = Background(expected_baseline=1.9)
    other = judge_measured(run(**A), run(1, **B), RELEASE, background=known)
    assert "but --expect-baseline says 1.9" in other.reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"template_sha256": "d" * 64}, "chat template: None, dddd"),
        ({"engine": "sglang"}, "engine: vllm, sglang"),
        ({"version": "0.33.0"}, "engine version: 0.32.0, 0.33.0"),
        ({"model": "other"}, "model: target, other"),
        ({"prompts_sha256": "e" * 64}, "prompts: "),
        ({"temperature": 1.0}, "temperature: 0, 1.0"),
        ({"max_new_tokens": 7}, "tokens asked for: 4000, 7"),
        ({"lossy": ("accept_threshold = 0.9",)}, "not have written (accept_threshold = 0.9)"),
        ({"count": 39}, "prompts: "),
    ],
)
def test_runs_that_differ_in_what_must_be_alike_are_anomalous(
    changes: dict[str, Any], message: str
) -> None:
    report = judge_measured(run(**A), run(1, **(B | changes)), RELEASE)
    assert (report.verdict, report.exit_code) == ("ANOMALOUS", 3)
    assert message in report.reason
    assert report.action is not None
    assert report.action.startswith("Measure both drafts on the same prompts")
    assert report.change is None
    assert report.categories == ()


def test_another_k_and_no_draft_at_all_are_anomalous() -> None:
    deeper = measurement([[2, 1, 0] * 60] * 40, num_draft_tokens=2, **B)
    report = judge_measured(run(**A), deeper, RELEASE)
    assert "The two drafts drafted 1 and 2 tokens per verify step" in report.reason
    plain = measurement(
        [[0] * 300] * 40, name="plain", of_record=[{"histogram": None, "accepted": None}] * 40
    )
    plain = dataclasses.replace(plain, setup=dataclasses.replace(plain.setup, speculation=None))
    report = judge_measured(run(**A), plain, RELEASE)
    assert "Plain was measured without a draft" in report.reason
    assert report.candidate.mean_acceptance_length == 1
    with pytest.raises(GateError, match="neither it nor plain was measured with a draft"):
        judge_measured(plain, dataclasses.replace(plain, records=plain.records[:1]), RELEASE)


def test_other_prompts_under_equal_hashes_are_anomalous() -> None:
    baseline, candidate = run(**A), run(1, **B)
    swapped = dataclasses.replace(candidate, records=candidate.records[::-1])
    assert "hold different prompts" in judge_measured(baseline, swapped, RELEASE).reason


def test_one_measurement_twice_is_no_comparison() -> None:
    one = run(**A)
    with pytest.raises(GateError, match="is the same measurement as drop 0: even all times"):
        judge_measured(one, dataclasses.replace(one, name="copy"), RELEASE)


def test_one_draft_twice_is_noise_unless_it_is_meant() -> None:
    with pytest.raises(GateError, match="measured the same draft as drop 0"):
        judge_measured(run(**A), run(0, 1, **A), RELEASE)
    meant = Background(unrelated=True)
    assert judge_measured(run(**A), run(0, 1, **A), RELEASE, background=meant).verdict == "PASS"


def test_a_folder_that_was_not_served_is_refused() -> None:
    folders = Background(baseline_sha256="a" * 64, candidate_sha256="f" * 64)
    with pytest.raises(GateError, match="was served with another draft: expected tensors ffff"):
        judge_measured(run(**A), run(1, **B), RELEASE, background=folders)


def test_too_short_outputs_are_bad_input() -> None:
    short = [measurement([[1, 0, 1]] * 40, **digest) for digest in (A, B)]
    with pytest.raises(GateError, match="measure --max-new-tokens"):
        judge_measured(*short, RELEASE)


def test_a_run_without_a_round_is_bad_input() -> None:
    none = measurement([[]] * 40, name="none", version="0.33.0", **B)
    with pytest.raises(
        GateError, match="none: has no verify step: all of its outputs are one token"
    ):
        judge_measured(run(**A), none, RELEASE)


def test_what_a_reader_has_to_know() -> None:
    fewer = [{"drafted": (*(0,) * 20, *(1,) * 180), "accepted": (*(0,) * 20, *(1,) * 180)}] * 40
    fewer = [one | {"histogram": (20, 180)} for one in fewer]
    baseline = measurement([[0] * 20 + [1] * 180] * 40, name="one", of_record=fewer)
    report = judge_measured(baseline, run(1, concurrency=8, name="two"), RELEASE)
    assert any(
        "one and two do not record which draft was served" in said for said in report.warnings
    )
    assert any("1 and 8 requests in flight" in said for said in report.warnings)
    assert any("10.0% of the verify steps of one fewer than K" in said for said in report.warnings)
    unsure = judge_measured(run(**A), run(1, acceptance_told=False, **B), RELEASE)
    assert any("of drop 1 does not report its acceptance rule" in said for said in unsure.warnings)
    untold = [{"accepted": None}] * 40
    wide = judge_measured(run(**A), run(1, of_record=untold, **B), RELEASE)
    assert any("so whole outputs are compared, with wider bounds" in said for said in wide.warnings)
    assert wide.served is not None
    assert wide.served.estimator == "whole outputs"
    assert wide.served.common_change is None


def test_equal_outputs_of_different_prompts_are_near_duplicates() -> None:
    loop = [{"token_ids": tuple(range(321))}] * 2
    one, other = (run(drop, of_record=loop, **digest) for drop, digest in ((0, A), (1, B)))
    report = judge_measured(one, other, RELEASE)
    assert any(said.startswith("2 distinct prompts hardly differ") for said in report.warnings)


def test_drawn_text_is_compared_whole_and_known_by_its_probability() -> None:
    drawn = {"temperature": 0.8, "top_p": 0.95, "top_k": 40}
    likely = [{"token_logprob": (math.log(0.5),) * 10}] * 40
    runs = [run(drop, of_record=likely, **drawn, **d) for drop, d in ((0, A), (1, B))]
    report = judge_measured(*runs, RELEASE)
    assert report.estimand.startswith("sampled (temperature 0.8, top-p 0.95, top-k 40) spec")
    assert report.served is not None
    assert report.served.estimator == "whole outputs"
    hard = {"min_step_acceptance": 0.99}  # a floor that only text of probability 0.5 is below
    assert judge_measured(*runs, dataclasses.replace(RELEASE, **hard)).verdict == "PASS"
    sure = [run(drop, **drawn, **d) for drop, d in ((0, A), (1, B))]
    assert judge_measured(*sure, dataclasses.replace(RELEASE, **hard)).verdict == "ANOMALOUS"


def test_the_report_is_json_with_every_field() -> None:
    report = judge_measured(run(**A), run(1, 1, **B), RELEASE)
    mapping = json.loads(json.dumps(report.to_mapping(), allow_nan=False))
    assert mapping["traces"] is mapping["first_step"] is mapping["draft_sampling"] is None
    assert mapping["served"]["concurrency"] == [1, 1]
    assert 0 < mapping["served"]["common_share"] <= 1
    assert mapping["baseline"]["every_position_mean_acceptance_length"] is None


def test_noise_smaller_than_the_limit_passes() -> None:
    noise = server_noise(run(**A), run(0, 1, **A), RELEASE)
    assert noise.verdict == "PASS"
    assert noise.change is not None
    assert noise.drift is not None
    assert noise.drift.lower < noise.change.lower


def test_a_server_that_repeats_itself_has_no_noise() -> None:
    noise = server_noise(run(**A), run(**A), RELEASE)
    assert noise.verdict == "PASS"
    assert noise.change is not None
    assert noise.change.upper == noise.change.lower == 0


def test_a_change_between_two_runs_of_one_server_is_anomalous() -> None:
    noise = server_noise(run(**A), run(4, 1, **A), RELEASE)
    assert noise.verdict == "ANOMALOUS"
    assert "The server changed between the two measurements" in noise.reason


def test_a_drift_is_what_chance_does_in_less_than_one_of_a_hundred_runs() -> None:
    """Beyond the policy's 95 % bounds a sound server is once in ten runs: that is noise."""
    policy = dataclasses.replace(RELEASE, max_relative_drop=0.2)
    noise = server_noise(run(**A), run(3, 8, **A), policy)
    assert noise.change is not None
    assert noise.drift is not None
    assert not noise.change.lower <= 0 <= noise.change.upper
    assert noise.drift.lower <= 0 <= noise.drift.upper
    assert noise.verdict == "PASS"
    assert noise.drift.confidence == 0.995


def test_noise_as_large_as_the_limit_is_inconclusive() -> None:
    noise = server_noise(run(**A), run(0, 20, **A), RELEASE)
    assert noise.verdict == "INCONCLUSIVE"
    assert "noise is as large as the limit of 1.00%" in noise.reason
    few = server_noise(run(count=1, **A), run(1, count=1, **A), RELEASE)
    assert (few.verdict, few.reason) == (
        "INCONCLUSIVE",
        "There are too few prompts to estimate the noise.",
    )


def test_noise_is_of_one_draft_on_one_server() -> None:
    with pytest.raises(GateError, match="measured another draft than drop 0, whose noise"):
        server_noise(run(**A), run(0, 1, **B), RELEASE)
    other = server_noise(run(**A), run(0, 1, version="0.33.0", **A), RELEASE)
    assert other.verdict == "ANOMALOUS"
    assert "this run does not repeat the first" in other.reason
    assert other.change is None


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
        mapping = json.loads(json.dumps(joint.to_mapping(), allow_nan=False))
        assert mapping["verdict"] == verdict
        assert set(mapping) >= {"served", "replayed", "noise", "parity", "warnings", "action"}
    action = joint_report(served=passed, noise=unsteady).action
    assert action is not None
    assert "measure all runs again in turns" in action


def test_a_replay_beside_it_is_held_against_what_was_served() -> None:
    passed = judge_measured(run(**A), run(0, 1, **B), RELEASE)
    alike = judge(replay(spread(600)), replay(noisy(0, 4)), RELEASE)
    (said,) = joint_report(served=passed, replayed=alike).warnings
    assert said.startswith("the change is +0.00% by replay and")
    assert said.endswith("chance explains the difference")
    failed = judge(replay(spread(600)), replay(noisy(64, 4)), RELEASE)
    both = joint_report(served=passed, replayed=failed).warnings
    assert any(said.endswith("chance does not explain the difference") for said in both)
    assert any("verdicts differ: FAIL by replay, PASS by the servers" in said for said in both)
    deep = [(300, 300, 400)] * 40
    other = judge(replay(deep), replay(deep), RELEASE)
    said = " ".join(joint_report(served=passed, replayed=other).warnings)
    assert "the replay used K = 2 and the servers K = 1" in said
