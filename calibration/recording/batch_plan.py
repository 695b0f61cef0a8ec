"""How many prompts run together: as many as asked for, where memory holds the longest so often."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..passes.devices import available_bytes
from ..prompts.prompt_file import Prompt
from .continuing import MAX_LOGITS
from .decoding import Decoding
from .kept_rows import LONG_TEXT, entry_bytes
from .recorded_target import RecordedTarget
from .row_independence import Independence, tried_independence
from .row_schedule import Together

_OF_AVAILABLE = 0.9
_OF_LOGITS = 12
"""Bytes that reading a prompt holds for each logit, and choosing a token for each of a row's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How many prompts run together, and which."""

    batch_size: int
    together: Together

    def num_together(self, lengths: Sequence[int]) -> list[int]:
        """With how many prompts each of these runs, itself included."""
        if self.together != "equal lengths":
            return [min(self.batch_size, len(lengths))] * len(lengths)
        count = Counter(lengths)
        return [min(self.batch_size, count[length]) for length in lengths]


def planned_batch(
    target: RecordedTarget,
    prompts: Sequence[Prompt],
    limits: Sequence[int],
    batch_size: int,
    decoding: Decoding,
    on_note: Callable[[str], None],
) -> BatchPlan:
    """Try the target on a few tokens, and plan.

    Args:
        limits: most new tokens of each.
        batch_size: prompts at most.
    """
    tried = tried_independence(target, prompts)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    if tried.why_not and len(set(lengths)) > 1 and batch_size > 1:
        on_note(
            "prompts of equal length alone are run together, because of this target:"
            f" {tried.why_not}"
        )
    rows = min(batch_size, len(prompts))
    longest = max(length + limit for length, limit in zip(lengths, limits, strict=True))
    fitting = _rows_that_fit(target, tried, longest, decoding)
    if fitting is not None and fitting < rows:
        on_note(
            f"{fitting} prompts are run together instead of {rows}: what is recorded and remembered"
            f" of more than these does not fit into the memory of {target.device}"
        )
        rows = fitting
    return BatchPlan(batch_size=rows, together=tried.together)


def _rows_that_fit(
    target: RecordedTarget, tried: Independence, longest: int, decoding: Decoding
) -> int | None:
    """Rows of the longest prompt; None where the free memory is not known."""
    from .slot_cache import spare_columns

    available = available_bytes(target.device)
    if available is None:
        return None
    width = target.width if longest <= LONG_TEXT else 0
    entry = entry_bytes(width, target.model.dtype, decoding.logprob_spec)
    row = 2 * longest * entry  # once more as it leaves
    row += (longest + spare_columns(longest)) * tried.token_bytes + tried.row_bytes
    row += _OF_LOGITS * 2 * target.config.vocab_size
    left = _OF_AVAILABLE * available - _OF_LOGITS * MAX_LOGITS
    return max(1, int(left / row))
