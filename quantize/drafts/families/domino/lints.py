"""Domino: among which tokens a slot chooses."""

from collections.abc import Iterator

from ...family import Draft
from ...lint import Lint
from ..dflash import lints as dflash


def candidate_pool(_draft: Draft) -> Iterator[Lint]:
    """Source: SGLang 0.5.23 `arg_groups/fields/spec.py:74`, `domino_greedy_rollout`."""
    yield Lint(
        name="domino-candidate-pool",
        level="note",
        cause="SGLang 0.5.23 chooses the first token of a block among all tokens, and the"
        " others among only 2,048: those that the head alone finds most likely at"
        " some position of the block. Training and replay always choose among all"
        " tokens",
        remedy="serve with --speculative-domino-candidate-pool-size 0, which gives the"
        " choice that replay computes",
    )


LINTS = (*dflash.LINTS, candidate_pool)
