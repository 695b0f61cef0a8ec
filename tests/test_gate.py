"""The gate's ladder: each verdict is reachable, and its limit is where the policy says."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from draftquant.calibration.traces.feature_evidence import FeatureEvidence
from draftquant.recipes import load_recipe
from draftquant.recipes.brief import apart
from draftquant.recipes.errors import GateError
from draftquant.scripts.verbs.gate import print_gate
from draftquant.validate.counting.acceptance_counts import AcceptanceCounts
from draftquant.validate.counting.draft_counts import FirstStepAgreement
from draftquant.validate.counting.paired_change import RequiredPrompts, paired_change
from draftquant.validate.judging.advice import Background, lose_less
from draftquant.validate.judging.categories import outcome
from draftquant.validate.judging.decision import min_baseline_length
from draftquant.validate.judging.judgement import GateReport, judge
from draftquant.validate.judging.policy import (
    MAX_LOOKS,
    POLICIES,
    REPLAYED,
    Look,
    OneDraft,
    Policy,
    Spending,
    boundaries,
    crossing_probability,
    parse_look,
    resolve_policy,
)
from draftquant.validate.report.html_report import page
from draftquant.validate.runs.drafts_judged import _algorithm_to_try, _recipes_to_try
from handmade_replays import BASELINE, FIGURES, RELEASE, noisy, replay, spread
from handmade_reports import document
from scipy import stats
from told import check_told, in_words

Rows = Sequence[tuple[int, ...]]


def of(baseline: Rows, candidate: Rows, policy: Policy = RELEASE, **known: Any) -> GateReport:
    drafts = replay(list(baseline)), replay(list(candidate))
    return judge(*drafts, policy, background=Background(**known))


def judged(
    drop: int, noise: int, count: int = 40, policy: Policy = RELEASE, **known: Any
) -> GateReport:
    """So many prompts of 1000 steps, each `drop` +- `noise` accepted tokens below 600 or so."""
    return of(spread(600, count), noisy(drop, noise, count), policy, **known)


def of_features(repeats: int, **evidence: Any) -> GateReport:
    traces = dataclasses.replace(FIGURES, features=FeatureEvidence(repeats=repeats, **evidence))
    return judge(replay(BASELINE, traces=traces), replay(noisy(3, 4), traces=traces), RELEASE)


OTHER_TARGET = [(500 - i, 250, 130, 120 + i) for i in range(40)]
"""A target of the same family that is not the draft's gave 1.87 where its own gives 2.90."""
NOTHING = [(990, 10)] * 40
LEARNED = "blackwell-nvfp4-learned"
VERDICTS: dict[str, tuple[str, Callable[[], GateReport]]] = {
    "smaller drop": ("PASS", lambda: judged(3, 4)),
    "larger drop": ("FAIL", lambda: judged(40, 4)),
    "the point alone": ("INCONCLUSIVE", lambda: judged(10, 60)),
    "beyond": ("INCONCLUSIVE", lambda: judged(17, 60)),
    "beyond, with a way": (
        "INCONCLUSIVE",
        lambda: judged(17, 60, algorithm_to_try="gptq", recipes_to_try=(LEARNED, "fp8-ptpc")),
    ),
    "beyond, with another algorithm": (
        "INCONCLUSIVE",
        lambda: judged(17, 60, cut=True, algorithm_to_try="gptq", recipes_to_try=("fp8-ptpc",)),
    ),
    "beyond, cut alone": ("FAIL", lambda: judged(40, 4, cut=True, quantized=False)),
    "near": ("INCONCLUSIVE", lambda: judged(15, 90, 200)),
    "both ends": ("INCONCLUSIVE", lambda: judged(7, 90, 200)),
    "few, and beyond": ("INCONCLUSIVE", lambda: judged(17, 60, 28)),
    "few, and near": ("INCONCLUSIVE", lambda: judged(16, 60, 28)),
    "few": ("INCONCLUSIVE", lambda: judged(0, 0, 29)),
    "enough": ("PASS", lambda: judged(0, 0, 30)),
    "one prompt": ("INCONCLUSIVE", lambda: of([(400, 600)], [(600, 400)])),
    "lost": ("ANOMALOUS", lambda: of(BASELINE, NOTHING)),
    "lost baseline": ("ANOMALOUS", lambda: of(NOTHING, NOTHING)),
    "ceiling": ("ANOMALOUS", lambda: of([(100, 100, 100, 700)] * 40, [(0, 0, 30, 970)] * 40)),
    "plausible gain": ("PASS", lambda: judged(-60, 4)),
    "gain": ("ANOMALOUS", lambda: judged(-90, 4)),
    "plausible gain by its estimate": ("PASS", lambda: judged(-75, 60)),
    "gain by its estimate": ("ANOMALOUS", lambda: judged(-90, 60)),
    "gain of another draft": ("PASS", lambda: judged(-90, 4, unrelated=True)),
    "unrecorded": ("ANOMALOUS", lambda: judged(3, 4, unrecorded=True)),
    "unrecorded, open": ("ANOMALOUS", lambda: judged(10, 60, unrecorded=True)),
    "unrecorded, worse": ("FAIL", lambda: judged(40, 4, unrecorded=True)),
    "unrecorded on purpose": (
        "PASS", lambda: judged(3, 4, 40, resolve_policy("release", unrecorded=True),
                               unrecorded=True),
    ),
    "unrecorded screening": (
        "PASS", lambda: judged(3, 4, 40, POLICIES["screening"], unrecorded=True),
    ),
    "constant features": ("ANOMALOUS", lambda: of_features(9000, constant=True, share={0: 0.0})),
    "features of other text": (
        "ANOMALOUS", lambda: of_features(9000, constant=False,
                                         share={-1: 0.004, 0: 0.005, 1: 0.003}),
    ),
    "shifted features": (
        "ANOMALOUS", lambda: of_features(9000, constant=False, share={-1: 0.4, 0: 0.6, 1: 0.9}),
    ),
    "another target": ("ANOMALOUS", lambda: judged(3, 4, head_agreement=0.97)),
    "nearly its target": ("ANOMALOUS", lambda: judged(3, 4, head_agreement=0.97996)),
    "calibrated beside another target": (
        "ANOMALOUS", lambda: judged(40, 4, other_target="a (01), not b (02)"),
    ),
    "its target": ("PASS", lambda: judged(3, 4, head_agreement=0.98)),
    "short baseline": ("ANOMALOUS", lambda: of(OTHER_TARGET, OTHER_TARGET)),
    "known baseline": ("PASS", lambda: of(OTHER_TARGET, OTHER_TARGET, expected_baseline=1.9)),
    "another baseline": (
        "ANOMALOUS", lambda: of(OTHER_TARGET, OTHER_TARGET, expected_baseline=2.1),
    ),
}  # fmt: skip


def test_a_rung_of_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each verdict, and what is told with it: of two drafts, and of a draft beside two targets."""
    scenes: dict[str, str] = {}
    beside = OneDraft(first="beside the first target", second="beside the second target",
                      cause="the target's precision", loses="Quantize the target otherwise.",
                      breaks="Check that this target loads.", gains="Read its text.")  # fmt: skip
    for wording in (REPLAYED, dataclasses.replace(REPLAYED, one_draft=beside)):
        monkeypatch.setattr("draftquant.validate.judging.judgement.REPLAYED", wording)
        for name, (verdict, report) in VERDICTS.items():
            found = report()
            code = {"PASS": 0, "FAIL": 1}.get(verdict, 3)
            assert (name, found.verdict, found.exit_code) == (name, verdict, code)
            assert (found.action is None) == (verdict == "PASS")
            scenes[f"{name}{' beside two targets' * bool(wording.one_draft)}"] = in_words(found)
    check_told("verdicts", scenes)


def test_what_is_plausible_ends_where_it_should() -> None:
    """K = 3: 3.88 and 1.05 tokens a step; one token in a thousand steps beyond is anomalous."""
    for inside, beyond, expected in (
        ((0, 0, 120, 880), (0, 0, 119, 881), None), ((950, 50, 0, 0), (951, 49, 0, 0), 1.05),
    ):  # fmt: skip
        for last, verdict in ((inside, "PASS"), (beyond, "ANOMALOUS")):
            assert of([inside] * 40, [last] * 40, expected_baseline=expected).verdict == verdict
    # 1.602 / 1.05 = 1.52571 and 1.602 / 0.95 = 1.68632
    for length, verdict in ((1.526, "PASS"), (1.525, "ANOMALOUS"), (1.686, "PASS"),
                            (1.687, "ANOMALOUS")):  # fmt: skip
        assert judged(3, 4, expected_baseline=length).verdict == verdict
    for length in (1.0, 2.5, float("nan")):
        with pytest.raises(GateError, match="--expect-baseline: expected a mean acceptance length"):
            judged(3, 4, expected_baseline=length)


def test_a_working_baseline_is_at_least_so_long() -> None:
    """1 + a + a^2 + ... by hand; of drawn text of probability 1/2 a is half as large."""
    assert min_baseline_length(replay([(1, 1, 1, 1)]), RELEASE) == pytest.approx(2.018875)
    drawn = dataclasses.replace(FIGURES, temperature=1, mean_token_probability=0.5)
    found = min_baseline_length(replay([(1, 1, 1)], traces=drawn), RELEASE)
    assert found == pytest.approx(1.350625)


TO_TRY: tuple[tuple[dict[str, Any], list[str]], ...] = (
    ({"algorithm_to_try": "gptq"}, ["RECIPE", "auto"]),
    ({"algorithm_to_try": "gptq", "recipes_to_try": ("x-gptq", "fp8")}, ["x-gptq", "fp8", "auto"]),
    ({"recipes_to_try": ("blackwell-nvfp4-learned", "blackwell-fp8-mla")},
     ["nvfp4-weights-gptq", "blackwell-fp8-mla", "blackwell-nvfp4-learned", "auto"]),
    ({"cut": True, "quantized": False}, []),
)  # fmt: skip
OTHERS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "int4-channel": ("gptq", ("int4-channel-gptq", "fp8-ptpc")),
    "int4-channel-gptq": (None, ("fp8-ptpc",)),
    "mi325x-w4a8": ("gptq", ("mi325x-w4a8-gptq", "mi325x-fp8")),
    "blackwell-nvfp4": ("gptq", ("blackwell-nvfp4-learned", "blackwell-fp8-mla")),
    "fp8-ptpc": (None, ()),
    "mi325x-fp8": (None, ()),
    "fp8-ptpc-head": (None, ("fp8-ptpc",)),
    "int4-channel-gptq-head": (None, ("fp8-ptpc",)),
}


def test_a_recipe_that_may_lose_less_is_named() -> None:
    for known, recipes in TO_TRY:
        _, *ways = (judged(17, 60, **known).action or "").splitlines()
        assert [w.partition("--recipe ")[2].split()[0] for w in ways if "--recipe" in w] == recipes
        assert ("--curve" in ways[0]) == ("cut" in known)
        assert all("--traces" in way for way in ways if "-gptq " in way or "-learned " in way)
    for recipe, found in OTHERS.items():
        made_by: Any = SimpleNamespace(recipe=load_recipe(recipe))
        assert (_algorithm_to_try(made_by), _recipes_to_try(made_by)) == found
    assert (_algorithm_to_try(None), _recipes_to_try(None)) == (None, ("fp8-ptpc",))
    ways = lose_less(Background(recipes_to_try=("fp8-ptpc",)))
    command = "draftquant quantize BF16 --recipe fp8-ptpc --out OUT"
    assert ways[0] == f"Take a wider format, the recipe fp8-ptpc: {command}"


SAID_APART = [
    (29.97, 30, ".1f", "29.97"), (30.04, 30, ".1f", "30.04"), (30, 30, ".1f", "30.0"),
    (28.96, 30, ".1f", "29.0"), (-0.009996, -0.01, "+.2%", "-0.9996%"),
    (0.9796, 0.98, ".0%", "97.96%"), (0.90004, 0.9, ".4g", "0.90004"),
    (0.5, None, "+.2%", "+50.00%"), (0.3, 0.1 + 0.2, ".1f", "0.3"),
]  # fmt: skip


def test_a_figure_is_told_from_its_limit() -> None:
    for value, limit, form, text in SAID_APART:
        assert apart(value, limit, form) == text
    same = [AcceptanceCounts(histogram=(5, 5))] * 2
    bounds = paired_change(same, same, confidence=0.95)
    near = dataclasses.replace(bounds, log_ratio=0.0, lower=math.log1p(-0.009999), upper=0.0)
    assert near.in_percent(0.01) == ("+0.00%", "-0.9999%", "+0.00%")
    assert near.in_percent() == ("+0.00%", "-1.00%", "+0.00%")


def test_a_sample_just_too_small_is_told_from_what_the_policy_needs() -> None:
    """In the reason, on the terminal and on the page: 29.97 is not 30."""
    *most, last = spread(600, 30)
    rows = [*most, tuple(int(1.18 * steps) for steps in last)]
    report = of(rows, rows)
    assert report.change is not None
    assert 29.95 < report.change.effective_num_prompts < 30
    effective = f"{report.change.effective_num_prompts:.2f}"
    assert f"an effective sample size of {effective}, and the policy 'release'" in report.reason
    assert f"effective sample size {effective}," in page(document(report))


def test_an_expected_baseline_is_said_with_every_verdict() -> None:
    found = of(OTHER_TARGET, OTHER_TARGET, expected_baseline=1.9)
    (said,) = [one for one in found.warnings if "--expect-baseline" in one]
    assert found.verdict == "PASS"
    assert said.startswith("whether the baseline's acceptance length, 1.9285, is that of right")


def test_the_limit_is_exactly_the_margin() -> None:
    """The margin just above, at and just below the drop that the lower (upper) bound shows."""
    counts = [[AcceptanceCounts(histogram=h) for h in each] for each in (BASELINE, noisy(8, 20))]
    change = paired_change(*counts, confidence=RELEASE.confidence)
    passing, failing = -math.expm1(change.lower), -math.expm1(change.upper)
    for margin, verdict in (
        (passing * (1 + 1e-9), "PASS"), (passing * (1 - 1e-9), "INCONCLUSIVE"),
        (failing * (1 + 1e-9), "INCONCLUSIVE"), (failing * (1 - 1e-9), "FAIL"),
    ):  # fmt: skip
        policy = dataclasses.replace(RELEASE, max_relative_drop=margin)
        assert judged(8, 20, policy=policy).verdict == verdict
    at = math.log1p(-0.25)
    for lower, upper in ((at, 0.0), (-1.0, at)):
        at_it = dataclasses.replace(change, lower=lower, upper=upper)
        assert outcome(at_it, 0.25) == "INCONCLUSIVE"


def test_the_prompts_asked_for_are_those_that_the_change_needs() -> None:
    """AL 1.6 with noise of +-0.1, no change: sd / sqrt(1 - 1/N) is 0.0625, slack -log(0.99)."""
    rows = [(400, 600)] * 20, [(300, 700), (500, 500)] * 10
    sd = 0.1 / 1.6 * math.sqrt(20 / 19)
    needed = [math.ceil(((1.6448536 + z) * sd / 0.0100503) ** 2) for z in (0.8416212, 1.6448536)]
    for power, number in zip((0.8, 0.95), needed, strict=True):
        found = of(*rows, dataclasses.replace(RELEASE, power=power)).required_num_prompts
        assert found is not None
        assert (found.as_measured, found.most, found.if_unchanged) == (number, None, number)
    thirty = RequiredPrompts(fewest=30, as_measured=30, most=30, if_unchanged=30)
    assert judged(0, 0, 29).required_num_prompts == thirty


def test_different_things_are_not_compared() -> None:
    rows: list[dict[str, Any]] = [
        {"traces": dataclasses.replace(FIGURES, sha256="1" * 64)},
        {"prompts": replay(BASELINE).prompts[::-1]},
        {"prompts": replay([(400, 300, 300)] * 40).prompts, "num_draft_tokens": 2},
        {"draft_sampling": "probabilistic"},
    ]
    for changes in rows:
        report = judge(replay(BASELINE), replay(BASELINE, **changes), RELEASE)
        assert (report.verdict, report.change, report.categories) == ("ANOMALOUS", None, ())


def test_the_two_drafts_are_not_mistaken_for_each_other() -> None:
    """Every figure of each draft, and the first steps of the candidate."""
    baseline = replay([(300, 300, 400)] * 40, name="bf16")
    histograms: list[tuple[int, ...]] = [(300, 308, 392), (300, 312, 388)] * 20
    every = AcceptanceCounts(histogram=(1, 2, 1))
    plain = replay(histograms).prompts
    prompts = tuple(dataclasses.replace(prompt, every_position=every) for prompt in plain)
    known = {"num_only_reference_hits": 2, "num_only_this_hits": 0}
    step = FirstStepAgreement(num_rows=10, num_equal=8, **known)
    candidate = replay(histograms, name="int4", prompts=prompts, first_step=step)
    report = judge(baseline, candidate, RELEASE, background=Background(warnings=("no proof",)))
    assert (report.verdict, report.first_step) == ("PASS", step)
    lengths = {
        one.name: (one.mean_acceptance_length, one.every_position_mean_acceptance_length)
        for one in (report.baseline, report.candidate)
    }
    assert lengths == {"bf16": pytest.approx((2.1, 2.1)), "int4": pytest.approx((2.09, 2.0))}
    assert report.candidate.histogram == (12000, 12400, 15600)
    assert report.candidate.num_emitted_tokens == 40 * 2090
    mapping = json.loads(json.dumps(report.to_mapping(), allow_nan=False))
    assert [f.name for f in dataclasses.fields(GateReport)] == list(mapping)
    assert mapping["warnings"][0] == "no proof"
    assert mapping["relative_change"] == pytest.approx(-0.01 / 2.1)


def test_policies_and_what_overrides_them() -> None:
    release, screening = POLICIES["release"], POLICIES["screening"]
    assert (release.max_relative_drop, release.confidence, release.min_prompts) == (0.01, 0.95, 30)
    assert (screening.max_relative_drop, screening.min_prompts) == (0.03, 10)
    changed: dict[str, Any] = {"max_relative_drop": 0.02, "confidence": 0.9, "min_prompts": 5}
    expected = dataclasses.replace(screening, name="custom", **changed)
    assert resolve_policy("screening", **changed) == expected
    assert resolve_policy("screening", unrecorded=True) == screening
    with pytest.raises(GateError, match=r"write 95 % as 0\.95"):
        resolve_policy("release", confidence=95)
    for name, value in {"name": "strict", "max_relative_drop": 1.0, "min_prompts": 1}.items():
        with pytest.raises(GateError):
            resolve_policy(**({"name": "release"} | {name: value}))  # type: ignore[arg-type]


# ---- planned looks

# Jennison & Turnbull (2000), tables 2.1 and 2.3: two-sided 0.10 and 0.05, which are one-sided 0.05
# and 0.025 but for the chance of crossing both sides, below 1e-4.
PUBLISHED: list[tuple[Spending, float, dict[int, float]]] = [
    ("pocock", 0.95, {1: 1.645, 2: 1.875, 3: 1.992, 4: 2.067, 5: 2.122}),
    ("pocock", 0.975, {2: 2.178, 3: 2.289, 4: 2.361, 5: 2.413}),
    ("obrien-fleming", 0.95, {1: 1.645, 2: 1.678, 3: 1.710, 4: 1.733, 5: 1.751}),
    ("obrien-fleming", 0.975, {2: 1.977, 3: 2.004, 4: 2.024, 5: 2.040}),
]


@pytest.mark.parametrize(("spending", "confidence", "published"), PUBLISHED)
def test_constants_are_the_published_ones(spending: Any, confidence: Any, published: Any) -> None:
    for total, constant in published.items():
        found = boundaries(total, spending, confidence)
        assert found[-1] == pytest.approx(constant, abs=6e-4)
        looks = range(1, total + 1)
        shape = [math.sqrt(total / i) if spending == "obrien-fleming" else 1 for i in looks]
        assert found == pytest.approx([found[-1] * factor for factor in shape])
    most = boundaries(MAX_LOOKS, spending, confidence)
    assert crossing_probability(most) == pytest.approx(1 - confidence, rel=1e-5)


def test_a_look_is_one_of_several() -> None:
    assert parse_look(None, None) is None
    assert parse_look("2/3", None) == Look(number=2, total=3, spending="obrien-fleming")
    assert parse_look("10/10", "pocock") == Look(number=10, total=10, spending="pocock")
    for text in ("", "2", "0/2", "3/2", "1/11", "a/b", "1/2/3", "-1/2", "²/3"):
        with pytest.raises(GateError, match="--look: expected i/n with 1 <= i <= n <= 10, got"):
            parse_look(text, None)
    with pytest.raises(GateError, match="--spending: needs --look, got none"):
        parse_look(None, "pocock")


def looked(drop: int, noise: int, look: str | None, spending: str | None = None) -> GateReport:
    rows = replay(BASELINE), replay(noisy(drop, noise))
    background = Background(warnings=("[bold]no[/] provenance",))
    return judge(*rows, RELEASE, look=parse_look(look, spending), background=background)


def test_the_gate_judges_by_the_bounds_of_the_look(capsys: pytest.CaptureFixture[str]) -> None:
    """Both pass alone and not at a first look; at the last of three the narrower one does."""
    for noise, at_last in ((25, "PASS"), (26, "INCONCLUSIVE")):
        verdicts = [looked(9, noise, look).verdict for look in (None, "1/3", "3/3")]
        assert verdicts == ["PASS", "INCONCLUSIVE", at_last]
    report = looked(10, 60, "1/3", "pocock")
    assert report.change is not None
    assert report.change.confidence == pytest.approx(float(stats.norm.cdf(1.99219)), abs=1e-6)
    assert "one-sided 97.68% bounds" in report.reason
    ways = (report.action or "").splitlines()
    assert "traces merge TRACES FRESH --out ALL" in ways[1]
    assert ways[2].endswith("--traces ALL --look 2/3 --spending pocock")
    print_gate(report, {"BF16": "'a draft'", "QUANT": "int4", "TRACES": "t"})
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "Gate, planned interim analysis 1 of 3"
    assert any(line.startswith("warning: this is planned interim analysis 1 of") for line in lines)
    record = "draftquant record --target TARGET --draft 'a draft' --tables --prompts PROMPTS"
    assert f"{record} --out FRESH" in lines  # BF16 is named; what nobody knows stays as it is


def test_bounds_of_two_prompts_at_a_first_look_are_beyond_all_bounds_and_are_said() -> None:
    """Student's quantile of one degree of freedom at 1 - 1e-7 is millions."""
    rows = spread(600, 60), noisy(0, 4, 58) + noisy(100, 90, 2)
    drafts = [replay(each, categories="a" * 58 + "bb") for each in rows]
    report = judge(*drafts, RELEASE, look=parse_look("1/10", None))
    assert report.categories[1].change is not None
    assert report.categories[1].change.upper > 1000
    read = document(report)
    assert read.judgement == report
    assert page(read)
