"""What was served against what is replayed: every kind of difference, explained or not."""

import dataclasses
from typing import Any

import pytest
import torch
from draftquant.calibration.traces.prompt_trace import PromptTrace, prompt_sha256
from draftquant.validate.measure.measurement import RequestRecord
from draftquant.validate.served.every_position import EveryPosition
from draftquant.validate.served.reconciled_prompt import ReconciledPrompt, reconcile_prompt
from handmade_measurements import record

K, NEAR, MAX_GAP = 2, 0.5, 0.5
TEXT = tuple(range(9))
CLEAR = ((9.0,) * K,) * 7
"""Of the seven rows whose K tokens lie in the nine of the text."""


def trace(continuation: tuple[int, ...] = TEXT, **changes: Any) -> PromptTrace:
    tokens = torch.tensor([7, *continuation])
    made = PromptTrace(
        id="p0",
        category="a",
        prompt_length=1,
        token_ids=tokens,
        features=torch.zeros(len(tokens) - 1, 1),
        target_top1=tokens[1:],
    )
    return dataclasses.replace(made, **changes)


def served(rounds: list[int], **changes: Any) -> RequestRecord:
    made = record(rounds, num_draft_tokens=K)
    own = {"token_ids": TEXT, "prompt_sha256": prompt_sha256([7])}
    return dataclasses.replace(made, **(own | changes))


def met(
    one: RequestRecord,
    accepted: tuple[int, ...] = (1, 9, 0, 2, 9, 9, 0),
    distances: tuple[tuple[float, ...], ...] = CLEAR,
    recorded: PromptTrace | None = None,
    **changes: Any,
) -> ReconciledPrompt:
    """`accepted` is replay's, by place; 9 where nothing asks."""
    places = EveryPosition(accepted=accepted, distances=distances)
    options: dict[str, Any] = {"near": NEAR, "gap": None, "max_gap": MAX_GAP} | changes
    return reconcile_prompt(one, recorded or trace(), places, K, **options)


def test_the_same_rounds_are_equal_and_those_at_the_end_are_the_servers_alone() -> None:
    """Rounds behind 1, 3, 4, 7 tokens of nine, and one behind 8, which replay does not count."""
    found = met(served([1, 0, 2, 0, 0]))
    assert found.outcome == "equal"
    assert found.differences == ()
    assert (found.num_compared, found.num_equal, found.num_beyond) == (4, 4, 1)
    assert found.served.histogram == (3, 1, 1)
    assert found.replayed.histogram == found.replayed_there.histogram == (2, 1, 1)
    assert found.served_there == found.replayed_there


@pytest.mark.parametrize(("distance", "kind"), [(0.4, "kernel"), (-0.5, "kernel"), (0.6, "round")])
def test_a_round_that_differs_is_looked_up_where_it_parted(distance: float, kind: str) -> None:
    """Behind 1 token replay accepts 1, the server none: they parted at the round's first token."""
    distances = ((distance, 9.0), *CLEAR[1:])
    found = met(served([0, 1, 0, 2, 0]), (1, 1, 9, 0, 2, 9, 9), distances)
    (one,) = found.differences
    assert (one.kind, one.position, one.explained) == (kind, 1, kind == "kernel")
    assert "accepted 0 draft tokens on the server, 1 in replay: the draft's logits are" in one.what
    assert found.outcome == ("explained" if kind == "kernel" else "unexplained")
    assert (found.num_compared, found.num_equal) == (4, 3)


def test_fewer_proposals_explain_what_they_explain() -> None:
    """Replay accepts 2 behind 4 tokens; a round with one proposal can accept one, but not none."""
    short = served([1, 0, 1, 0, 0, 0], drafted=(2, 2, 1, 2, 2, 2))
    (one,) = met(short, (1, 9, 0, 2, 9, 0, 0)).differences
    assert (one.kind, one.position, one.explained) == ("K", 4, True)
    assert one.what.endswith("the server proposed 1 in it")
    none = served([1, 0, 0, 0, 2], drafted=(2, 2, 1, 2, 2))
    (one,) = met(none, (1, 9, 0, 2, 0, 2, 0)).differences
    assert (one.kind, one.explained) == ("round", False)


def test_another_draft_explains_other_rounds() -> None:
    found = met(served([0, 1, 0, 2, 0]), (1, 1, 9, 0, 2, 9, 9), other_draft=True)
    assert [(one.kind, one.explained) for one in found.differences] == [("draft", True)]


@pytest.mark.parametrize(
    ("gap", "explained", "said"),
    [
        (0.5, True, "which is a near tie of the target, 0.500 nats apart"),
        (0.6, False, "which is not a near tie of the target, 0.600 nats apart"),
        (None, None, "the record does not show how near a tie that was"),
    ],
)
def test_texts_that_part_are_explained_by_a_near_tie(
    gap: float | None, explained: bool | None, said: str
) -> None:
    other = served([1, 0, 2, 0, 0], token_ids=(*TEXT[:6], 66, 67, 68))
    found = met(other, gap=gap)
    (one,) = found.differences
    assert (one.kind, one.position, one.explained) == ("text", 6, explained)
    assert one.what == f"token 6 is 66, recorded is 6{':' if gap else ';'} {said}"
    assert (found.num_common, found.num_compared, found.num_beyond) == (6, 3, 2)
    worst = {True: "explained", False: "unexplained", None: "not known"}
    assert found.outcome == worst[explained]


def test_an_output_that_was_asked_for_shorter_parts_from_nothing() -> None:
    longer = trace((*TEXT, 9, 10))
    found = met(served([1, 0, 2, 0, 0]), recorded=longer)
    assert found.outcome == "equal"
    shorter = served([1, 0, 2], token_ids=TEXT[:7])
    assert met(shorter).outcome == "equal"


def test_another_prompt_of_the_same_name_is_another_template() -> None:
    found = met(served([1, 0, 2, 0, 0], prompt_sha256=prompt_sha256([8])))
    (one,) = found.differences
    assert (one.kind, one.explained, found.outcome) == ("prompt", True, "explained")
    assert "another chat template" in one.what
    assert (found.num_compared, found.num_beyond) == (0, 5)


def test_an_engine_that_tells_histograms_is_held_against_those_of_the_same_text() -> None:
    told = served([1, 0, 2, 0, 0], accepted=None)
    found = met(told)
    assert found.outcome == "equal"
    assert (found.num_compared, found.num_beyond) == (0, 5)
    for histogram in ((0, 2, 1), (5, 1, 1)):  # too few of a kind; more than the end can hold
        (one,) = met(dataclasses.replace(told, histogram=histogram)).differences
        assert (one.kind, one.explained) == ("untold", None)
    parted = dataclasses.replace(told, token_ids=(*TEXT[:6], 66, 67, 68))
    assert [one.kind for one in met(parted, gap=0.1).differences] == ["text", "untold"]


def test_unexplained_is_worse_than_not_known() -> None:
    other = served([0, 1, 0, 2, 0], token_ids=(*TEXT[:6], 66, 67, 68))
    found = met(other, (1, 1, 9, 0, 2, 9, 9))
    assert {one.explained for one in found.differences} == {None, False}
    assert found.outcome == "unexplained"
