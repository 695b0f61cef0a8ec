"""Which prompts a target can continue, asked of its sizes before its weights are read."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import TraceError
from ..prompts.prompt_file import Prompt
from ..traces.dataset_source import DatasetSource
from ..traces.too_long import TooLong, TooLongPrompts
from .target_shape import TargetShape

_MOST_NAMED = 20
"""Prompts that one error names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPrompts:
    """Prompts that the target can continue.

    Attributes:
        prompts: at least one.
        too_long: those that were left out or cut; None where all of them fit.
        dataset: that they were taken out of, for trace.json.
    """

    prompts: tuple[Prompt, ...]
    too_long: TooLongPrompts | None
    dataset: DatasetSource | None = None


def fitted_prompts(
    prompts: Sequence[Prompt],
    shape: TargetShape,
    max_new_tokens: int,
    too_long: TooLong = "error",
    where: object = "prompts",
) -> FittedPrompts:
    """Refuse prompts that the target cannot continue, or leave out or cut those that are too long.

    Args:
        too_long: what becomes of a prompt that leaves too few positions for its continuation.
            "truncate" keeps its last tokens, as engines do that truncate prompts.
        where: the file that they were read from, for errors.

    Raises:
        TraceError: names every prompt that does not fit; or none is left.
    """
    if not prompts:
        raise TraceError(where, "expected at least one prompt", fix="give a prompt file")
    room = _room(shape, max_new_tokens)
    longer = [prompt for prompt in prompts if room is not None and len(prompt.token_ids) > room]
    foreign = [prompt for prompt in prompts if not _in_vocabulary(prompt, shape)]
    problems = [f"prompt {p.id}: it has token ids beyond the vocabulary" for p in foreign]
    if too_long == "error":
        problems += [
            f"prompt {p.id}: {len(p.token_ids) + max_new_tokens} tokens, prompt and continuation"
            for p in longer
        ]
    if problems:
        raise _misfits(where, problems, len(prompts), shape, foreign=bool(foreign))
    ids = tuple(prompt.id for prompt in longer)
    if not ids:
        return FittedPrompts(prompts=tuple(prompts), too_long=None)
    if too_long == "truncate":
        assert room is not None  # some prompt is longer
        cut = (dataclasses.replace(p, token_ids=p.token_ids[-room:]) for p in prompts)
        return FittedPrompts(prompts=tuple(cut), too_long=TooLongPrompts(truncated=ids))
    left = tuple(prompt for prompt in prompts if prompt.id not in ids)
    if not left:
        raise TraceError(
            where,
            f"all {len(prompts)} are longer than {room} tokens and would be left out",
            fix="give shorter prompts, or cut them: --too-long truncate",
        )
    return FittedPrompts(prompts=left, too_long=TooLongPrompts(skipped=ids))


def check_prompts(prompts: Sequence[Prompt], shape: TargetShape, max_new_tokens: int) -> None:
    """Refuse prompts that the target cannot continue.

    Raises:
        TraceError: as `fitted_prompts`.
    """
    fitted_prompts(prompts, shape, max_new_tokens)


def _room(shape: TargetShape, max_new_tokens: int) -> int | None:
    """Tokens that a prompt may have; None = any number."""
    if shape.max_positions is None:
        return None
    room = shape.max_positions - max_new_tokens
    if room < 1:
        raise TraceError(
            "--max-new-tokens",
            f"{max_new_tokens} new tokens leave no room for a prompt: the target has"
            f" {shape.max_positions} positions",
            fix=f"give at most {shape.max_positions - 1}",
        )
    return room


def _in_vocabulary(prompt: Prompt, shape: TargetShape) -> bool:
    return bool(prompt.token_ids) and max(prompt.token_ids) < shape.vocab_size


def _misfits(
    where: object, problems: Sequence[str], num_prompts: int, shape: TargetShape, *, foreign: bool
) -> TraceError:
    more = len(problems) - _MOST_NAMED
    limits = f"token ids below {shape.vocab_size}"
    if shape.max_positions is not None:
        limits += f" and at most {shape.max_positions} tokens with the continuation"
    return TraceError(
        where,
        f"{len(problems)} of {num_prompts} do not fit the target, expected {limits}",
        details=[*problems[:_MOST_NAMED], *([f"and {more} more"] if more > 0 else [])],
        fix="tokenize the prompts with this target's tokenizer"
        if foreign
        else "leave them out (--too-long skip), cut them (--too-long truncate), or lower"
        " --max-new-tokens",
    )
