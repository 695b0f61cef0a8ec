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
        cause="SGLang 0.5.23 chooses all but the first token of a block among the 2,048 that"
        " the head alone finds most likely somewhere in it; replay, as training, among all",
        remedy="serve with --speculative-domino-candidate-pool-size 0 to have what is replayed",
    )


LINTS = (*dflash.LINTS, candidate_pool)
