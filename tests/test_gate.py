"""The gate: each verdict is reachable, the limit is where the policy says, the report is JSON."""

import dataclasses
import json
import math
from typing import Any

import pytest
from draftquant.recipes.errors import GateError
from draftquant.recipes.schema import PolicyName
from draftquant.validate.counting.acceptance_counts import AcceptanceCounts
from draftquant.validate.counting.draft_counts import FirstStepAgreement
from draftquant.validate.counting.paired_change import RequiredPrompts, paired_change
from draftquant.validate.judging.advice import Background
from draftquant.validate.judging.categories import outcome
from draftquant.validate.judging.judgement import GateReport, judge
from draftquant.validate.judging.policy import POLICIES, Policy, resolve_policy
from handmade_replays import BASELINE, FIGURES, RELEASE, noisy, replay, spread


def test_pass_when_the_lower_bound_clears_the_limit() -> None:
    report = judge(replay(BASELINE), replay(noisy(3, 4)), RELEASE)
    assert (report.verdict, report.exit_code, report.action) == ("PASS", 0, None)
    assert report.change is not None
    assert report.change.relative_change == pytest.approx(-0.003 / 1.602)
    assert report.reason.startswith(
        "With 95% confidence the drop is smaller than the limit of 1.00%, but 40 distinct prompts"
        " (effective sample size 40.0) do not exclude a loss that is confined to few prompts: the"
        " mean acceptance length"
    )


@pytest.mark.parametrize(
    ("count", "long", "warned"),
    [(99, 1, True), (100, 1, False), (400, 1, False), (200, 8, True), (200, 2, False)],
)
def test_a_pass_says_that_few_prompts_hide_a_rare_loss(count: int, long: int, warned: bool) -> None:
    """By effective sample size too: of 200 prompts, one in ten of eight times the others' steps."""
    sizes = [1 if i % 10 else long for i in range(count)]
    baseline, candidate = (
        replay([(a * n, b * n) for (a, b), n in zip(histograms, sizes, strict=True)])
        for histograms in (spread(600, count), noisy(3, 4, count))
    )
    report = judge(baseline, candidate, RELEASE)
    assert report.verdict == "PASS"
    assert ("do not exclude a loss that is confined" in report.reason) == warned


def test_fail_when_the_upper_bound_is_beyond_the_limit() -> None:
    report = judge(replay(BASELINE), replay(noisy(40, 4)), RELEASE)
    assert (report.verdict, report.exit_code) == ("FAIL", 1)
    assert report.action is not None
    assert "wider format" in report.action


def test_inconclusive_between_and_how_many_prompts_would_do() -> None:
    report = judge(replay(BASELINE), replay(noisy(10, 60)), RELEASE)
    assert (report.verdict, report.exit_code) == ("INCONCLUSIVE", 3)
    found = report.required_num_prompts
    assert found is not None
    assert found.fewest is not None
    assert found.as_measured is not None
    assert 40 < found.if_unchanged < found.fewest < found.as_measured
    assert found.most is None  # its 20 % point is beyond the limit
    assert report.action is not None
    ways = report.action.splitlines()
    assert ways[0] == (
        f"Record about {found.as_measured} fresh prompts ({found.fewest} if the draft loses less"
        " than was measured, more than 10,000 if it loses more): draftquant record --target"
        " TARGET --draft BF16 --tables --prompts PROMPTS --out FRESH"
    )
    assert ways[1] == (
        "Judge them alone and only once, because each further try adds up to 5% false passes:"
        " draftquant gate BF16 QUANT --traces FRESH"
    )
    assert ways[2].endswith(": draftquant gate BF16 QUANT --traces FRESH --look 1/3")
    assert ways[3] == "Or use a wider format."


def test_inconclusive_beyond_the_limit_asks_for_a_better_draft() -> None:
    report = judge(replay(BASELINE), replay(noisy(17, 60)), RELEASE)
    assert report.verdict == "INCONCLUSIVE"
    assert report.required_num_prompts is not None
    assert report.required_num_prompts.as_measured is None
    assert report.action is not None
    assert report.action.splitlines() == [
        "More prompts will most likely not help: the measured change is itself beyond the limit.",
        "Use a wider format.",
        "Compare drafts by the recipes that 'draftquant recipes list --gpu GPU' names with this"
        " one, on prompts that neither calibrated them nor will judge them: draftquant compare BF16"
        " QUANT OUT1 OUT2 --traces OTHERS",
    ]


@pytest.mark.parametrize(
    ("background", "ways"),
    [
        (
            Background(algorithm_to_try="gptq"),
            [
                "Round its four bits with gptq on traces of other prompts: draftquant quantize BF16"
                " --recipe RECIPE --algorithm gptq --traces CALIBRATION --out OUT",
                "Use a wider format.",
                "Compare drafts by the recipes that 'draftquant recipes list --gpu GPU' names with"
                " this one, on prompts that neither calibrated them nor will judge them:"
                " draftquant compare BF16 QUANT OUT1 OUT2 --traces OTHERS",
            ],
        ),
        (
            Background(algorithm_to_try="gptq", recipes_to_try=("mine-gptq", "fp8")),
            [
                "Take the recipe mine-gptq, whose rounding is calibrated on traces: draftquant"
                " quantize BF16 --recipe mine-gptq --traces CALIBRATION --out OUT",
                "Take a wider format, FP8: draftquant quantize BF16 --recipe fp8 --out OUT",
                "Compare drafts by mine-gptq and fp8 with this one, on prompts that neither"
                " calibrated them nor will judge them: draftquant compare BF16 QUANT OUT1 OUT2"
                " --traces OTHERS",
            ],
        ),
        (
            Background(
                algorithm_to_try="gptq",
                recipes_to_try=("blackwell-nvfp4-learned", "blackwell-fp8-mla"),
            ),
            [
                "Keep the inputs in BF16 and round the FP4 weights by GPTQ: draftquant quantize"
                " BF16 --recipe nvfp4-weights-gptq --traces CALIBRATION --out OUT",
                "Take a wider format, FP8: draftquant quantize BF16 --recipe blackwell-fp8-mla"
                " --out OUT",
                "Take the recipe blackwell-nvfp4-learned, whose rounding is calibrated on traces:"
                " draftquant quantize BF16 --recipe blackwell-nvfp4-learned --traces CALIBRATION"
                " --out OUT",
                "Compare drafts by nvfp4-weights-gptq, blackwell-fp8-mla and"
                " blackwell-nvfp4-learned with this one, on prompts that neither calibrated them"
                " nor will judge them: draftquant compare BF16 QUANT OUT1 OUT2 OUT3"
                " --traces OTHERS",
            ],
        ),
        (
            Background(recipes_to_try=("fp8",)),
            [
                "Take a wider format, FP8: draftquant quantize BF16 --recipe fp8 --out OUT",
                "Compare drafts by fp8 with this one, on prompts that neither calibrated them nor"
                " will judge them: draftquant compare BF16 QUANT OUT1 --traces OTHERS",
            ],
        ),
    ],
)
def test_a_recipe_that_may_lose_less_is_named(background: Background, ways: list[str]) -> None:
    action = judge(replay(BASELINE), replay(noisy(17, 60)), RELEASE, background=background).action
    assert action is not None
    assert action.splitlines()[1:] == ways


def test_both_ends_of_the_range_are_said() -> None:
    """-0.44 %: even its 20 % point is inside 1 %; and one number where the policy's least rules."""
    wide = judge(replay(spread(600, 200)), replay(noisy(7, 90, 200)), RELEASE)
    found = wide.required_num_prompts
    assert found is not None
    assert found.most is not None
    assert wide.action is not None
    assert f"Record about {found.as_measured:,} fresh prompts ({found.fewest:,} if" in wide.action
    assert f"was measured, {found.most:,} if it loses more): " in wide.action
    equal = judge(replay(spread(600, 29)), replay(spread(600, 29)), RELEASE)
    assert equal.action is not None
    assert equal.action.startswith("Record 30 fresh prompts or more: draftquant record ")


def test_no_number_is_advised_that_nobody_records() -> None:
    """-0.96 % measured: thousands of prompts and more; and with more noise, over ten thousand."""
    near = judge(replay(spread(600, 200)), replay(noisy(15, 90, 200)), RELEASE)
    assert near.required_num_prompts is not None
    assert near.required_num_prompts.as_measured is not None
    assert near.required_num_prompts.as_measured > 10_000
    first, *ways = (near.action or "").splitlines()
    assert first == (
        "More prompts will hardly help: the measured change is so near the limit that more than"
        " 10,000 would be needed."
    )
    assert ways[0] == "Use a wider format."


@pytest.mark.parametrize("drop", [17, 16])
def test_too_few_prompts_are_never_told_that_more_will_not_help(drop: int) -> None:
    """Beyond the limit by what 28 prompts show, or too near it for ten thousand."""
    report = judge(replay(spread(600, 28)), replay(noisy(drop, 60, 28)), RELEASE)
    assert report.reason.startswith("There are too few prompts: 28 distinct prompts have an")
    needed = report.required_num_prompts
    assert needed is not None
    assert needed.as_measured is None or needed.as_measured > 10_000
    first, *ways = (report.action or "").splitlines()
    assert first.startswith(
        "Record 30 fresh prompts or more (with about 91, a draft that lost nothing passes):"
        " draftquant record "
    )
    assert ways[2] == "Or use a wider format."


def test_a_prompt_that_is_left_out_is_said() -> None:
    short = [*spread(600), (0, 0)]
    report = judge(replay(short), replay([*noisy(3, 4), (0, 0)]), RELEASE)
    assert (report.verdict, report.num_prompts, report.num_short_prompts) == ("PASS", 40, 1)
    assert "1 of the 41 prompts is left out, too short for a verify step" in report.warnings


def test_a_candidate_without_a_record_does_not_pass_a_release() -> None:
    foreign = Background(unrecorded=True)

    def verdict(drop: int, noise: int, policy: Policy = RELEASE) -> str:
        return judge(
            replay(BASELINE), replay(noisy(drop, noise)), policy, background=foreign
        ).verdict

    assert verdict(3, 4) == "ANOMALOUS"
    assert verdict(10, 60) == "ANOMALOUS"  # more prompts would not help
    assert verdict(40, 4) == "FAIL"
    assert verdict(3, 4, resolve_policy("release", unrecorded=True)) == "PASS"
    assert verdict(3, 4, POLICIES["screening"]) == "PASS"
    report = judge(replay(BASELINE), replay(noisy(3, 4)), RELEASE, background=foreign)
    assert "has no record (draftquant.json)" in report.reason
    assert "--unrecorded" in (report.action or "")


def test_the_limit_is_exactly_the_margin() -> None:
    """The margin just above, at and just below the drop that the lower (upper) bound shows."""
    candidate = noisy(8, 20)
    change = paired_change(
        [AcceptanceCounts(histogram=h) for h in BASELINE],
        [AcceptanceCounts(histogram=h) for h in candidate],
        confidence=RELEASE.confidence,
    )
    passing, failing = -math.expm1(change.lower), -math.expm1(change.upper)
    assert 0 < failing < passing

    def verdict(margin: float) -> str:
        policy = dataclasses.replace(RELEASE, max_relative_drop=margin)
        return judge(replay(BASELINE), replay(candidate), policy).verdict

    assert verdict(passing * (1 + 1e-9)) == "PASS"
    assert verdict(passing * (1 - 1e-9)) == "INCONCLUSIVE"
    assert verdict(failing * (1 + 1e-9)) == "INCONCLUSIVE"
    assert verdict(failing * (1 - 1e-9)) == "FAIL"


def test_a_bound_at_the_margin_decides_nothing() -> None:
    limit = 0.25
    change = paired_change(
        [AcceptanceCounts(histogram=h) for h in BASELINE],
        [AcceptanceCounts(histogram=h) for h in noisy(8, 20)],
        confidence=RELEASE.confidence,
    )
    at, above = math.log1p(-limit), math.nextafter(math.log1p(-limit), 0)
    below = math.nextafter(at, -1)

    def found(lower: float, upper: float) -> str:
        return outcome(dataclasses.replace(change, lower=lower, upper=upper), limit)

    assert found(at, 0.0) == found(-1.0, at) == found(at, at) == "INCONCLUSIVE"
    assert found(above, 0.0) == "PASS"
    assert found(-1.0, below) == "FAIL"


def test_a_point_estimate_above_the_limit_is_not_a_pass() -> None:
    """-0.6 % measured, limit -1 %, but the bound reaches beyond: the naive rule would pass this."""
    report = judge(replay(BASELINE), replay(noisy(10, 60)), RELEASE)
    assert report.change is not None
    assert report.change.relative_change > -RELEASE.max_relative_drop
    assert report.verdict == "INCONCLUSIVE"


@pytest.mark.parametrize(("count", "verdict"), [(29, "INCONCLUSIVE"), (30, "PASS")])
def test_too_few_prompts_are_inconclusive(count: int, verdict: str) -> None:
    report = judge(replay(spread(600, count)), replay(spread(600, count)), RELEASE)
    assert report.verdict == verdict
    if verdict == "INCONCLUSIVE":
        assert report.required_num_prompts == RequiredPrompts(
            fewest=30, as_measured=30, most=30, if_unchanged=30
        )
        assert report.reason == (
            "There are too few prompts: 29 distinct prompts have an effective sample size of 29.0,"
            " and the policy 'release' needs an effective sample size of 30."
        )


def test_the_prompts_asked_for_are_those_that_the_change_needs() -> None:
    """By hand: AL 1.6 with noise of +-0.1, no change, so that as measured is unchanged.

    theta without a prompt is log(1 -+ 0.1 / (1.6 * 19)): psi = +-d, d = 0.0625 to four digits, and
    sd^2 = d^2 N / (N - 1). N = ((1.64485 + 0.84162) sd / slack)^2, slack = -log(0.99) = 0.01005.
    """
    candidate = [(300, 700), (500, 500)] * 10
    report = judge(replay([(400, 600)] * 20), replay(candidate), RELEASE)
    sd = 0.1 / 1.6 * math.sqrt(20 / 19)
    needed = math.ceil(((1.6448536 + 0.8416212) * sd / 0.0100503) ** 2)
    assert needed > 200
    assert report.verdict == "INCONCLUSIVE"
    found = report.required_num_prompts
    assert found is not None
    assert (found.as_measured, found.if_unchanged, found.most) == (needed, needed, None)
    better = 0.8416212 * sd / math.sqrt(20)  # the 80 % point of the change
    assert found.fewest == math.ceil(((1.6448536 + 0.8416212) * sd / (better + 0.0100503)) ** 2)
    certain = dataclasses.replace(RELEASE, power=0.95)
    more = judge(replay([(400, 600)] * 20), replay(candidate), certain).required_num_prompts
    assert more is not None
    assert more.if_unchanged == math.ceil((2 * 1.6448536 * sd / 0.0100503) ** 2)


@pytest.mark.parametrize("drop", [0, 200])
def test_one_prompt_has_no_bound(drop: int) -> None:
    report = judge(replay([(400, 600)]), replay([(400 + drop, 600 - drop)]), RELEASE)
    assert report.verdict == "INCONCLUSIVE"
    assert report.change is None
    assert report.to_mapping()["relative_change"] is None


def test_a_lost_draft_is_a_broken_load() -> None:
    report = judge(replay(BASELINE), replay([(990, 10)] * 40), RELEASE)
    assert (report.verdict, report.exit_code) == ("ANOMALOUS", 3)
    assert "no token of the candidate is accepted (mean acceptance length 1.0100)" in report.reason
    assert "loaded wrongly" in report.reason
    report = judge(replay([(990, 10)] * 40), replay([(990, 10)] * 40), RELEASE)
    assert "Almost no token of the baseline is accepted" in report.reason


def test_an_acceptance_near_the_ceiling_is_not_believed() -> None:
    """K = 3: 0.97 * 4 = 3.88; the published 3.97 of 4 would be questioned."""
    normal, suspicious = [(100, 100, 100, 700)] * 40, [(0, 0, 30, 970)] * 40
    assert judge(replay(normal), replay(normal), RELEASE).verdict == "PASS"
    report = judge(replay(normal), replay(suspicious), RELEASE)
    assert report.verdict == "ANOMALOUS"
    assert "3.9700, is too close to the maximum of 4 (a working draft" in report.reason
    assert "below 3.8800)" in report.reason


def test_an_implausible_gain_is_anomalous_and_a_plausible_one_passes() -> None:
    report = judge(replay(BASELINE), replay(noisy(-90, 4)), RELEASE)
    assert report.verdict == "ANOMALOUS"
    assert "+5.62%" in report.reason
    assert judge(replay(BASELINE), replay(noisy(-60, 4)), RELEASE).verdict == "PASS"


def test_a_gain_is_implausible_by_its_estimate_not_by_its_bound() -> None:
    """+5.6 % measured; the lower bound, far below +5 %, does not make it any more plausible."""
    report = judge(replay(BASELINE), replay(noisy(-90, 60)), RELEASE)
    assert report.change is not None
    assert report.change.lower < math.log1p(0.05) < report.change.log_ratio
    assert report.verdict == "ANOMALOUS"
    assert judge(replay(BASELINE), replay(noisy(-75, 60)), RELEASE).verdict == "PASS"


def test_the_limits_of_what_is_plausible_are_plausible_themselves() -> None:
    """K = 3: 3.88 and 1.05 tokens per step; one token in a thousand steps beyond is anomalous."""
    for inside, beyond, expected, what in (
        ((0, 0, 120, 880), (0, 0, 119, 881), None, "a working draft stays below 3.8800"),
        ((950, 50, 0, 0), (951, 49, 0, 0), 1.05, "Almost no token"),
    ):
        known = Background(expected_baseline=expected)
        same = judge(replay([inside] * 40), replay([inside] * 40), RELEASE, background=known)
        assert same.verdict == "PASS"
        report = judge(replay([inside] * 40), replay([beyond] * 40), RELEASE, background=known)
        assert report.verdict == "ANOMALOUS"
        assert what in report.reason
        assert "candidate" in report.reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"traces": dataclasses.replace(FIGURES, sha256="1" * 64)}, "different traces"),
        ({"prompts": replay(BASELINE).prompts[::-1]}, "different prompts"),
        ({"prompts": replay(BASELINE).prompts[1:]}, "different prompts"),
    ],
)
def test_different_things_are_not_compared(changes: dict[str, Any], message: str) -> None:
    report = judge(replay(BASELINE), replay(BASELINE, **changes), RELEASE)
    assert (report.verdict, report.exit_code) == ("ANOMALOUS", 3)
    assert message in report.reason
    assert report.change is None
    assert report.categories == ()


def test_different_numbers_of_draft_tokens_are_not_compared() -> None:
    report = judge(replay(BASELINE), replay([(400, 300, 300)] * 40), RELEASE)
    assert "drafted 1 and 2 tokens per verify step" in report.reason
    assert report.verdict == "ANOMALOUS"


def test_prompts_without_a_round_are_left_out() -> None:
    report = judge(replay([*BASELINE, (0, 0)]), replay([*BASELINE, (0, 0)]), RELEASE)
    assert (report.num_prompts, report.num_short_prompts) == (40, 1)
    assert report.verdict == "PASS"


def test_categories_are_reported() -> None:
    report = judge(
        replay(BASELINE, categories="ab"), replay(noisy(0, 20), categories="ab"), RELEASE
    )
    low, high = report.categories
    assert (low.category, low.num_prompts) == ("a", 20)
    assert low.change is not None
    assert high.change is not None
    assert low.change.log_ratio > 0 > high.change.log_ratio
    # Per 5 prompts 600 .. 604 of 1000 are accepted, 20 more (a) or fewer (b) by the candidate.
    for found, candidate in ((low, 1.622), (high, 1.582)):
        assert found.baseline_mean_acceptance_length == pytest.approx(1.602)
        assert found.candidate_mean_acceptance_length == pytest.approx(candidate)


def test_the_two_drafts_are_not_mistaken_for_each_other() -> None:
    """Every figure of each draft, and the first steps of the candidate."""
    baseline = replay([(300, 300, 400)] * 40, name="bf16")
    histograms = [(300, 308, 392), (300, 312, 388)] * 20
    prompts = tuple(
        dataclasses.replace(prompt, every_position=AcceptanceCounts(histogram=(1, 2, 1)))
        for prompt in replay(histograms).prompts
    )
    step = FirstStepAgreement(
        num_rows=10, num_equal=8, num_only_reference_hits=2, num_only_this_hits=0
    )
    candidate = replay(histograms, name="int4", prompts=prompts, first_step=step)
    report = judge(baseline, candidate, RELEASE)
    assert report.verdict == "PASS"
    assert report.first_step == step
    lengths = {
        figures.name: (
            figures.mean_acceptance_length,
            figures.every_position_mean_acceptance_length,
        )
        for figures in (report.baseline, report.candidate)
    }
    assert lengths == {"bf16": pytest.approx((2.1, 2.1)), "int4": pytest.approx((2.09, 2.0))}
    assert report.candidate.histogram == (12000, 12400, 15600)
    assert report.candidate.num_emitted_tokens == 40 * 2090


def test_warnings_from_before_come_first() -> None:
    report = judge(
        replay(BASELINE),
        replay(noisy(3, 4)),
        RELEASE,
        background=Background(warnings=("no provenance",)),
    )
    assert report.warnings[0] == "no provenance"
    assert report.to_mapping()["warnings"][0] == "no provenance"


def test_the_report_is_json_with_every_field() -> None:
    report: GateReport = judge(replay(BASELINE, name="bf16"), replay(noisy(3, 4)), RELEASE)
    mapping = json.loads(json.dumps(report.to_mapping(), allow_nan=False))
    assert mapping["exit_code"] == 0
    assert mapping["policy"]["max_relative_drop"] == 0.01
    assert mapping["baseline"]["name"] == "bf16"
    assert mapping["baseline"]["survival"] == [pytest.approx(0.602)]
    assert mapping["change"]["num_prompts"] == mapping["num_prompts"] == 40
    assert mapping["first_step"]["num_only_reference_hits"] == 1
    assert mapping["relative_change"] == pytest.approx(-0.003 / 1.602)
    assert [f.name for f in dataclasses.fields(GateReport)] == list(mapping)


def test_policies() -> None:
    release, screening = POLICIES["release"], POLICIES["screening"]
    assert (release.max_relative_drop, release.confidence, release.min_prompts) == (0.01, 0.95, 30)
    assert (screening.max_relative_drop, screening.min_prompts) == (0.03, 10)
    assert set(POLICIES) == set(PolicyName.__args__)  # type: ignore[attr-defined]
    assert all(policy.name == name for name, policy in POLICIES.items())


def test_overrides() -> None:
    assert resolve_policy("release") == RELEASE
    got = resolve_policy("screening", max_relative_drop=0.02, confidence=0.9, min_prompts=5)
    expected: Policy = dataclasses.replace(
        POLICIES["screening"], name="custom", max_relative_drop=0.02, confidence=0.9, min_prompts=5
    )
    assert got == expected
    assert resolve_policy("release", unrecorded=True) == dataclasses.replace(
        RELEASE, name="custom", record_required=False
    )
    assert resolve_policy("screening", unrecorded=True) == POLICIES["screening"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "strict"}, "no policy 'strict'"),
        ({"max_relative_drop": 0.0}, "max_relative_drop: expected a share"),
        ({"max_relative_drop": 1.0}, "max_relative_drop: expected a share"),
        ({"confidence": 0.5}, "confidence: expected a share"),
        ({"confidence": 95}, "write 95 % as 0.95"),
        ({"min_prompts": 1}, "min_prompts: expected at least 2"),
    ],
)
def test_impossible_policies(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(GateError, match=message):
        resolve_policy(**({"name": "release"} | arguments))
