"""DSpark's forward maths against the trainer's own module, and an independent draft.

`dspark_maths.json` holds what SpecForge's own `DSparkDraftModel` computes;
the independent draft chooses token by token. Tolerance: see test_dflash_forward.py; a Markov head
adds some ten products of the same size.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.quantize.drafts.families.dspark import DSpark, DSparkGeometry
from draftquant.quantize.drafts.passes import BlockAttention, BlockForward
from dspark_case import CONFIG, K, features, geometry_of, tokens, weights_of
from reference_draft import assert_close
from reference_dspark import ReferenceDSpark
from torch import Tensor

pytestmark = pytest.mark.usefixtures("float64_on_one_thread")

TABLE = json.loads(
    (Path(__file__).parents[1] / "experiments" / "engines" / "dspark_maths.json").read_text(
        encoding="utf-8"
    )
)


def build(**changes: Any) -> tuple[DSparkGeometry, dict[str, Tensor], BlockForward]:
    geometry = geometry_of(**changes)
    weights = weights_of(geometry)
    return geometry, weights, DSpark().forward(geometry, weights, lambda _name, x: x)


def block_logits(forward: BlockForward, context: Tensor, block: list[int]) -> Tensor:
    """[K, draft vocabulary] of one block behind a context [1, T, features]."""
    position = context.shape[1]
    attention = BlockAttention(forward, forward.fuse(context))
    attention.begin(range(position, position + 1))
    hidden = forward.block(torch.tensor([block]), torch.tensor([position]), attention)
    return forward.logits(hidden)[0]


def test_logits_are_those_of_the_trainers_own_module() -> None:
    geometry, _, forward = build()
    got = block_logits(forward, features(geometry), tokens())
    expected = torch.tensor(TABLE["vanilla"], dtype=torch.float64)
    assert_close(got[:, : expected.shape[1]], expected)


@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 24}, {"sample_from_anchor": False}])
def test_logits_are_those_of_a_draft_that_chooses_token_by_token(
    changes: dict[str, Any],
) -> None:
    geometry, weights, forward = build(**changes)
    reference = ReferenceDSpark(geometry, weights)
    reference.extend(features(geometry))
    block = tokens()
    recorded = iter(block[1:])
    expected = reference.steps(block[0], K, lambda _logits: next(recorded))
    assert_close(block_logits(forward, features(geometry), block), torch.stack(expected))


def test_each_slot_reads_the_token_before_it() -> None:
    geometry, _, forward = build()
    plain, other = tokens(), tokens()
    other[2] += 1
    moved = (
        (
            block_logits(forward, features(geometry), other)
            - block_logits(forward, features(geometry), plain)
        )
        .abs()
        .amax(-1)
    )
    assert (moved[:2] == 0).all()
    assert moved[2] > 1e-4
    assert (moved[3:] == 0).all()


def test_blocks_of_a_trace_read_the_recorded_tokens() -> None:
    """`BlockForward.passes` gives every block the tokens behind its own anchor."""
    geometry, _, forward = build()
    context = features(geometry)
    ids = torch.arange(1, context.shape[1] + 2) * 7 % geometry.vocab_size
    rows = range(2, context.shape[1] - K)
    for one in forward.passes(
        forward.fuse(context), ids[None], rows=rows, num_draft_tokens=K, block_rows=9
    ):
        for i, row in enumerate(one.rows):
            block = ids[row + 1 : row + 2 + K].tolist()
            expected = block_logits(forward, context[:, : row + 1], block)
            assert_close(forward.logits(one.hidden[0, i]), expected)


def test_the_head_reads_normed_states_and_rounding_reaches_it() -> None:
    geometry, weights, plain = build()
    seen: list[tuple[int, ...]] = []

    def halved(name: str, x: Tensor) -> Tensor:
        if name == "lm_head":
            seen.append(tuple(x.shape))
        return x / 2 if name == "lm_head" else x

    got = block_logits(DSpark().forward(geometry, weights, halved), features(geometry), tokens())
    exact = block_logits(plain, features(geometry), tokens())
    assert seen == [(1, K, CONFIG["hidden_size"])]
    assert (got - exact).abs().max() > 1e-4
