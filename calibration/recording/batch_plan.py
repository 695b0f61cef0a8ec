"""How many prompts run together: as many as requested, if memory holds that many of the longest."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..passes.devices import available_bytes
from ..prompts.prompt_file import Prompt
from ..traces.prompt_trace import PromptTrace
from .continuing import MAX_LOGITS, Continuing, Together
from .decoding import LONG_TEXT, Decoding
from .target_model import RecordedTarget

# A row must not see padding, nor depend on other rows. Which targets guarantee that is known for
# the kinds of layers below; whether this one does is tried on three short prompts, once together
# and once alone.

_TRIED = ((9, 4), (8, 2), (4, 2))
"""Tokens of the prompts, and new ones: two are read together, the second leaves, and the third
takes its place."""
_MAX_APART = {torch.float64: 1e-3, torch.float32: 1e-3}
_MAX_APART_ROUNDED = 5e-2
"""Relative difference of a row's features when sums have another order, with a wide margin."""
_ROPES_BY_LENGTH = ("dynamic", "longrope")  # rotary angles that depend on the longest row


class _Tried(NamedTuple):
    together: Together
    why_not: str | None  # what prevents prompts of different lengths
    token_bytes: int  # bytes of its cache per token
    row_bytes: int  # and per row of any length


def _tried(target: RecordedTarget, prompts: Sequence[Prompt]) -> _Tried:
    """What a target can continue together, tried on beginnings of these prompts."""
    from .slot_cache import held_bytes

    short = _short_prompts(prompts)
    alone, cache = _continued(target, short, "equal lengths")
    of_tokens, of_row = held_bytes(cache)
    together, why_not = _by_kind(target, cache)
    if why_not is None:
        batched, _ = _continued(target, short, together)
        why_not = _difference(batched, alone)
    token_bytes = of_tokens // (sum(_TRIED[-1]) - 1)  # the last one is not read
    return _Tried("equal lengths" if why_not else together, why_not, token_bytes, of_row)


def _by_kind(target: RecordedTarget, cache: Any) -> tuple[Together, str | None]:
    from .slot_cache import takes_padding, unheld_layer

    parameters = inspect.signature(target.model.forward).parameters
    for name in ("position_ids", "attention_mask"):
        if name not in parameters:
            return "equal lengths", f"it takes no {name}"
    if kind := unheld_layer(cache):
        return "equal lengths", f"its cache has layers of the kind {kind}"
    kinds = getattr(target.config, "layer_types", None) or ()
    if getattr(target.config, "attention_chunk_size", None) or "chunked_attention" in kinds:
        return "equal lengths", "its attention sees chunks of the text"
    if rope := _rope_by_length(getattr(target.config, "rope_parameters", None)):
        return "equal lengths", f"its rotary angles depend on the longest text ({rope})"
    return ("any lengths" if takes_padding(cache) else "equal prompts"), None


def _rope_by_length(parameters: Any) -> str | None:
    """The kind of rotary angles, for all layers or one kind of them."""
    if not isinstance(parameters, Mapping):
        return None
    kind = parameters.get("rope_type")
    if kind in _ROPES_BY_LENGTH:
        return str(kind)
    return next(filter(None, map(_rope_by_length, parameters.values())), None)


def _short_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    token_ids = [token for prompt in prompts[:8] for token in prompt.token_ids]
    longest = max(length for length, _ in _TRIED)
    wanted = longest * len(_TRIED)
    token_ids = (token_ids * wanted)[:wanted]
    return [
        Prompt(id=str(i), category="tried", token_ids=tuple(token_ids[i * longest :][:length]))
        for i, (length, _) in enumerate(_TRIED)
    ]


def _continued(
    target: RecordedTarget, prompts: Sequence[Prompt], together: Together
) -> tuple[list[PromptTrace], Any]:
    running = Continuing(
        target,
        prompts,
        [limit for _, limit in _TRIED],
        Decoding(ignore_eos=True),
        together=together,
        batch_size=len(prompts) - 1,
    )
    traces: dict[int, PromptTrace] = {}
    for left in running.run(lambda _rows: None):
        left.wait()
        traces |= dict(left.traces)
    return [traces[i] for i in range(len(prompts))], running.cache


def _difference(batched: Sequence[PromptTrace], alone: Sequence[PromptTrace]) -> str | None:
    for trace, reference in zip(batched, alone, strict=True):
        count = min(len(trace.features), len(reference.features))
        equal = (trace.token_ids[:count] == reference.token_ids[:count]).long().cumprod(0)
        count = int(equal.sum())  # after a tie that falls otherwise, the texts differ
        expected = reference.features[:count].double()
        apart = float((trace.features[:count].double() - expected).norm() / expected.norm())
        if not apart <= _MAX_APART.get(reference.features.dtype, _MAX_APART_ROUNDED):
            return f"its hidden states differ by {apart:.1%} when prompts run together"
    return None


_OF_AVAILABLE = 0.9
_OF_LOGITS = 12
"""Bytes per logit while reading a prompt, and while choosing a token for each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How many prompts run together, and which."""

    batch_size: int
    together: Together


def planned_batch(
    target: RecordedTarget,
    prompts: Sequence[Prompt],
    limits: Sequence[int],
    batch_size: int,
    decoding: Decoding,
    on_note: Callable[[str], None],
) -> BatchPlan:
    """Try the target on a few tokens, and plan."""
    tried = _tried(target, prompts)
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
    target: RecordedTarget, tried: _Tried, longest: int, decoding: Decoding
) -> int | None:
    """Rows of the longest prompt; None where the free memory is not known."""
    from .slot_cache import spare_columns

    available = available_bytes(target.device)
    if available is None:
        return None
    width = target.width if longest <= LONG_TEXT else 0
    spec = decoding.logprob_spec
    entry = width * target.model.dtype.itemsize + 16 + (4 + 12 * spec.num_top if spec else 0)
    row = 2 * longest * entry  # once more as it leaves
    row += (longest + spare_columns(longest)) * tried.token_bytes + tried.row_bytes
    row += _OF_LOGITS * 2 * target.config.vocab_size
    left = _OF_AVAILABLE * available - _OF_LOGITS * MAX_LOGITS
    return max(1, int(left / row))
