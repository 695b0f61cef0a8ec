"""The divergence audit on outputs made by hand: each kind of difference, and what it means."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from draftquant.recipes.errors import ParityError
from draftquant.validate.measure.measurement import Measurement
from draftquant.validate.parity.divergence_findings import LEAST_NOISE, audit, divergence_findings
from draftquant.validate.parity.finding import Finding
from handmade_runs import SPECULATION, record, run
from scipy import stats

TEXT = (5, 6, 7, 8)
GAPS = (3.0, 0.1, 0.2, 2.0)


def plain(count: int = 30, **asked: Any) -> Measurement:
    records = [record(i, TEXT, top_gap=GAPS) for i in range(count)]
    return run(records, name="plain", **asked)


def speculative(
    changed: dict[int, Sequence[int]], count: int = 30, ended: str = "length", **asked: Any
) -> Measurement:
    records = [
        record(i, changed.get(i, TEXT), ended=ended if i in changed else "length")
        for i in range(count)
    ]
    return run(records, name="q", speculation=SPECULATION, **asked)


def only(*arguments: Any, **options: Any) -> Finding:
    (finding,) = divergence_findings(*arguments, **options)
    return finding


def test_equal_outputs_pass() -> None:
    found = only(plain(), [speculative({})])
    assert (found.verdict, found.estimate, found.threshold) == ("PASS", 0, 0)
    assert found.reason.startswith("30 of 30 outputs are identical and 0 diverge")
    assert found.details[0]["identity_rate"] == 1
    assert found.details[0]["tokens"] == 120


@pytest.mark.parametrize(
    ("output", "ended", "position", "explained"),
    [
        ((5, 9, 9, 9), "length", 1, True),  # a gap of 0.1
        ((5, 6, 9, 9), "length", 2, True),  # of 0.2
        ((9, 6, 7, 8), "length", 0, False),  # of 3
        ((5, 6, 7, 9), "length", 3, False),  # of 2
        ((5,), "stop", 1, True),  # the end of the text was as likely
        ((5, 6, 7), "stop", 3, False),
        ((5,), "length", 1, False),  # noise cuts nothing off
        ((5, 6, 7, 8, 9), "length", 4, False),  # nor does it add
        (TEXT, "stop", 4, False),
    ],
)
def test_a_first_difference(
    output: Sequence[int], ended: str, position: int, explained: bool
) -> None:
    found = audit(plain(2), speculative({1: output}, 2, ended), max_gap=0.25)
    (one,) = found.divergences
    assert (one.id, one.category, one.position, one.explained) == ("p1", "b", position, explained)
    assert one.gap == (GAPS[position] if position < 4 else None)
    assert found.identity_rate == 0.5
    assert found.num_tokens == 4 + position + 1
    judged = only(plain(30), [speculative({1: output}, 30, ended)])
    assert judged.verdict == ("PASS" if explained else "FAIL")
    assert judged.estimate == (0 if explained else 1)
    if not explained:
        assert f"prompt p1 at output token {position}" in judged.reason


def test_the_limit_of_noise() -> None:
    run_ = speculative({3: (5, 6, 9, 9)})
    assert only(plain(), [run_], max_gap=0.2).verdict == "PASS"
    assert only(plain(), [run_], max_gap=0.19).verdict == "FAIL"
    assert only(plain(), [run_], max_gap=0).verdict == "FAIL"


def test_a_second_plain_run_says_what_noise_is() -> None:
    base = run([record(i, TEXT, top_gap=(3.0, 0.02, 0.15, 0.4)) for i in range(30)], name="plain")

    def noisy(count: int, output: Sequence[int]) -> Measurement:
        return run(
            [record(i, output if i < count else TEXT) for i in range(30)],
            name="again",
            concurrency=16,
        )

    small, large, few = noisy(5, (5, 9)), noisy(5, (5, 6, 7, 9)), noisy(4, (5, 9))
    for again, max_gap, verdicts in (
        (None, 0.25, ("PASS", "PASS", "FAIL")),
        (few, 0.25, ("PASS", "PASS", "FAIL")),
        (small, LEAST_NOISE, ("PASS", "FAIL", "FAIL")),  # twice 0.02 is less
        (large, 0.5, ("PASS", "PASS", "PASS")),
    ):
        for position, verdict in enumerate(verdicts, start=1):
            one = speculative({4: (*TEXT[:position], 9)})
            judged = divergence_findings(base, [one], plain_again=again)[0]
            assert judged.verdict == verdict, judged.reason
            assert judged.details[0]["max_gap"] == max_gap
    _, hazard = divergence_findings(base, [speculative({4: (5, 9)})], plain_again=few)
    assert hazard.verdict == "INCONCLUSIVE"
    assert "no threshold was given (--max-hazard-ratio)" in hazard.reason
    assert hazard.estimate == pytest.approx((1 / 118) / (4 / 112))


def test_a_near_tie_explains_no_third_token() -> None:
    told = [
        record(i, TEXT, top_gap=GAPS, token_logprob=(-0.1, -1.0, -1.0, -0.1)) for i in range(30)
    ]
    for logprob, verdict in ((-1.1, "PASS"), (-1.5, "PASS"), (-1.51, "FAIL"), (-0.4, "FAIL")):
        changed = record(3, (5, 9, 9, 9), token_logprob=(-0.1, logprob, -1.0, -1.0))
        spec = run([*told[:3], changed, *told[4:]], speculation=SPECULATION)
        found = only(run(told), [spec])
        assert found.verdict == verdict
        assert found.details[1]["drop"] == pytest.approx(-1.0 - logprob)


def test_a_plain_run_that_is_not_itself_says_nothing() -> None:
    wild = run(
        [record(i, (9, 9, 9, 9) if i == 2 else TEXT) for i in range(30)],
        name="again",
        concurrency=16,
    )
    judged, _ = divergence_findings(plain(), [speculative({})], plain_again=wild)
    assert judged.verdict == "ANOMALOUS"
    assert "two plain runs diverge from each other (again)" in judged.reason


def test_hazards_are_compared_exactly() -> None:
    """The bounds are where the tails of the binomial have 5 %."""
    again = run(
        [record(i, (5, 9, 9, 9) if i < 2 else TEXT) for i in range(60)],
        name="again",
        concurrency=16,
    )
    often = speculative({i: (5, 9, 9, 9) for i in range(12)}, 60)
    _, found = divergence_findings(plain(60), [often], plain_again=again, max_hazard_ratio=1.5)
    ours, theirs = 12 * 2 + 48 * 4, 2 * 2 + 58 * 4
    assert found.estimate == pytest.approx((12 / ours) / (2 / theirs))
    assert found.lower is not None
    assert found.upper is not None
    low, high = (x * ours / (x * ours + theirs) for x in (found.lower, found.upper))
    assert stats.binom.sf(11, 14, low) == pytest.approx(0.05)
    assert stats.binom.cdf(12, 14, high) == pytest.approx(0.05)
    assert found.verdict == "FAIL"
    loose = divergence_findings(plain(60), [often], plain_again=again, max_hazard_ratio=50)
    assert loose[1].verdict == "PASS"
    between = divergence_findings(plain(60), [often], plain_again=again, max_hazard_ratio=5)
    assert between[1].verdict == "INCONCLUSIVE"
    never = run([record(i, TEXT) for i in range(60)], name="again", concurrency=16)
    none = divergence_findings(
        plain(60), [speculative({}, 60)], plain_again=never, max_hazard_ratio=1
    )
    assert none[1].verdict == "PASS"
    some = divergence_findings(plain(60), [often], plain_again=never, max_hazard_ratio=1)
    assert (some[1].verdict, some[1].estimate, some[1].upper) == ("FAIL", None, None)


def test_too_few_prompts_pass_nothing_but_fail() -> None:
    copies = [record(0, TEXT, top_gap=GAPS, id=f"c{i}") for i in range(40)]
    spec = run([replace(r, top_gap=None) for r in copies], speculation=SPECULATION)
    found = only(run(copies), [spec])
    assert found.verdict == "INCONCLUSIVE"
    assert "expected at least 30 distinct prompts (--min-prompts)" in found.reason
    assert only(plain(4), [speculative({}, 4)], min_prompts=4).verdict == "PASS"
    assert only(plain(4), [speculative({1: (9,)}, 4)]).verdict == "FAIL"


def test_lossy_acceptance_is_no_parity() -> None:
    lossy = replace(SPECULATION, lossy=("rejection_sample_method = fly",))
    one = run(plain().records, speculation=lossy)
    found = only(plain(), [one])
    assert found.verdict == "ANOMALOUS"
    assert "rejection_sample_method = fly" in found.reason


def test_every_speculative_run_is_judged() -> None:
    found = divergence_findings(plain(), [speculative({}), speculative({0: (9,)})])
    assert [one.verdict for one in found] == ["PASS", "FAIL"]


OTHER = plain(concurrency=9)


@pytest.mark.parametrize(("first", "second", "options", "what"), [
    (plain(temperature=0.7), speculative({}, temperature=0.7), {}, "drawn at temperature 0.7"),
    (plain(), speculative({}, temperature=1.0), {}, "temperature: 0, 1.0"),
    (plain(30), speculative({}, 29), {}, "prompts: "),
    (plain(), speculative({}, version="0.33.0"), {}, "engine version: 0.32.0, 0.33.0"),
    (plain(), speculative({}, template_sha256="a" * 64), {}, "chat template: None"),
    (plain(), speculative({}, max_new_tokens=9), {}, "tokens asked for: 8, 9"),
    (run([record(i, TEXT) for i in range(30)]), speculative({}), {}, "does not say how far apart"),
    (run([record(i, TEXT, top_gap=(1.0,)) for i in range(30)]), speculative({}), {}, "how far ap"),
    (speculative({}), speculative({}), {}, "expected a server without a draft"),
    (plain(), plain(), {}, "expected a server with a draft"),
    (plain(), speculative({}), {"plain_again": speculative({})}, "a server without a draft"),
    (plain(), speculative({}), {"max_gap": float("nan")}, "expected nats, at least 0"),
    (plain(), speculative({}), {"max_hazard_ratio": 2.0}, "needs a second plain run"),
    (plain(), speculative({}), {"max_hazard_ratio": 0.0, "plain_again": OTHER}, "more than 0"),
    (plain(), speculative({}), {"plain_again": plain()}, "4 requests in flight, as many as plain"),
    (plain(), speculative({}), {"min_prompts": 0}, "--min-prompts: expected at least"),
])  # fmt: skip
def test_runs_that_cannot_be_compared(
    first: Measurement, second: Measurement, options: dict[str, Any], what: str
) -> None:
    with pytest.raises(ParityError, match=what):
        divergence_findings(first, [second], **options)


def test_other_prompts_under_the_same_hash() -> None:
    """A file is checked when it is read; what is made in memory, here."""
    base = plain(3)
    other = run([record(i, TEXT) for i in (0, 1, 5)], speculation=SPECULATION)
    setup = replace(other.setup, asked=base.setup.asked)
    with pytest.raises(ParityError, match="2 prompt"):
        divergence_findings(base, [replace(other, setup=setup)])
