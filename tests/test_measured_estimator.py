"""Which rounds of two servers lie in common text, what they weigh, and what is not taken for it."""

import dataclasses

import pytest
from draftquant.validate.measure.measurement import RequestRecord
from draftquant.validate.served.common_steps import (
    PAIRED_NOISE,
    common_length,
    pair_outputs,
    step_starts,
    whole_counts,
)
from handmade_measurements import record

K = 2


def run(accepted: list[int], **changes: object) -> RequestRecord:
    return record(accepted, num_draft_tokens=K, **changes)  # type: ignore[arg-type]


def test_common_text_ends_at_the_first_difference_or_with_the_shorter() -> None:
    assert common_length((1, 2, 3), (1, 2, 4)) == 2
    assert common_length((1, 2), (1, 2, 4)) == 2
    assert common_length((5,), (1, 2)) == 0
    assert common_length((), (1,)) == 0


def test_rounds_begin_behind_the_prompts_token_and_what_was_accepted() -> None:
    assert step_starts(run([2, 0, 1]), K) == [1, 4, 5]


def test_rounds_that_do_not_add_up_to_the_output_have_no_place() -> None:
    """Five tokens more than the rounds wrote: steps without a draft, somewhere."""
    one = run([2, 0, 1])
    assert step_starts(dataclasses.replace(one, token_ids=(*one.token_ids, *range(5))), K) is None
    assert step_starts(dataclasses.replace(one, token_ids=one.token_ids[:4]), K) is None
    assert step_starts(dataclasses.replace(one, accepted=None), K) is None
    assert step_starts(dataclasses.replace(one, accepted=()), K) is None


def test_tokens_beyond_the_end_and_cut_rounds_are_no_gap() -> None:
    """vLLM counts what a last round accepted beyond the end; TensorRT-LLM leaves that round out."""
    one = run([2, 0, 2])  # writes tokens 1 .. 7
    assert step_starts(dataclasses.replace(one, token_ids=one.token_ids[:6]), K) == [1, 4, 5]
    left_out = dataclasses.replace(one, accepted=(2, 0), token_ids=one.token_ids[:7])
    assert step_starts(left_out, K) is None
    assert step_starts(dataclasses.replace(left_out, num_cut_rounds=1), K) == [1, 4]
    longer = dataclasses.replace(left_out, num_cut_rounds=1, token_ids=one.token_ids)
    assert step_starts(longer, K) is None  # 3 tokens are not written, cut rounds have at most K


def test_equal_outputs_are_counted_by_the_rule_of_replay() -> None:
    """Rounds behind 1, 4, 5, 8 tokens of 9: what the last one drafts reaches behind the end."""
    baseline, candidate = run([2, 0, 2, 0]), run([0, 1, 2, 0, 0])
    candidate = dataclasses.replace(candidate, token_ids=baseline.token_ids)
    pair = pair_outputs(baseline, candidate, K, greedy=True)
    assert pair.identical
    own, other = pair.weighted()
    assert own.histogram == (1, 0, 2)  # 8 + 2 > 9
    assert pair.baseline.rest.histogram == (1, 0, 0)
    assert other.histogram == (2, 1, 1)  # behind 1, 2, 4, 7 tokens; that behind 8 is not


def test_weights_are_those_of_places_by_hand() -> None:
    """12 tokens each, 8 common: n = 10 rows, c = 6 of them common, r = 4."""
    baseline = run([2, 2, 1, 2])
    candidate = run([2, 0, 1, 0, 2, 0])
    for one in (baseline, candidate):
        assert len(one.token_ids) == 12
    parted = (*baseline.token_ids[:8], *range(900, 904))
    pair = pair_outputs(baseline, dataclasses.replace(candidate, token_ids=parted), K, greedy=True)
    assert (pair.num_common, pair.identical, pair.placed) == (8, False, True)
    assert pair.baseline.common.histogram == (0, 0, 2)  # behind 1 and 4
    assert pair.baseline.rest.histogram == (0, 1, 1)
    assert pair.candidate.common.histogram == (1, 1, 1)  # behind 1, 4, 5
    divisor = 6 + PAIRED_NOISE * 4
    common, rest = 1 + 4 / divisor, 1 - 6 / divisor
    own, other = pair.weighted()
    assert own.histogram == pytest.approx((0, rest, 2 * common + rest))
    assert other.histogram == pytest.approx((common + 2 * rest, common, common + rest))


def test_nothing_in_common_is_the_sum_of_all_rounds() -> None:
    baseline, candidate = run([2, 0, 1]), run([0, 0, 1], parts_at=1)
    pair = pair_outputs(baseline, candidate, K, greedy=True)
    assert pair.weighted() == (whole_counts(baseline, K), whole_counts(candidate, K))


@pytest.mark.parametrize("side", [0, 1])
def test_without_places_whole_outputs_are_compared(side: int) -> None:
    runs = [run([2, 0, 1]), run([2, 0, 1])]
    runs[side] = dataclasses.replace(runs[side], accepted=None)
    pair = pair_outputs(*runs, K, greedy=True)
    assert not pair.placed
    assert pair.weighted() == (whole_counts(runs[0], K), whole_counts(runs[1], K))
    assert pair.baseline.common.num_steps == pair.candidate.common.num_steps == 0


def test_where_tokens_are_drawn_no_round_is_taken_for_common() -> None:
    """Whether two draws agree depends on what was accepted: to choose by it would choose rounds."""
    pair = pair_outputs(run([2, 0, 1]), run([2, 0, 1]), K, greedy=False)
    assert (pair.identical, pair.placed) == (True, False)
    assert pair.weighted()[0] == whole_counts(run([2, 0, 1]), K)


def test_an_output_too_short_for_a_known_outcome_has_no_round() -> None:
    one = dataclasses.replace(run([2]), token_ids=(0, 1))
    pair = pair_outputs(one, one, K, greedy=True)
    assert [counts.num_steps for counts in pair.weighted()] == [0, 0]


def test_without_speculation_every_token_behind_the_first_is_a_step() -> None:
    plain = dataclasses.replace(run([1, 1]), histogram=None, accepted=None)
    counts = whole_counts(plain, K)
    assert counts.histogram == (4, 0, 0)
    assert counts.mean_acceptance_length == 1
