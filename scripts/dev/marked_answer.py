"""An answer of the target in which what a draft proposed, and the target accepted, is marked."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from transformers import AutoTokenizer

from ...calibration.traces.trace_folder import TraceFolder
from ..frame.console import stdout
from ..verbs.replay import replay

BEGIN, END = "«", "»"
"""Around accepted tokens, so that a terminal without colours shows them too."""
STYLE = "green"
Part = tuple[str, str]
"""Text and its style."""


def marked_lines(
    token_ids: Sequence[int], steps: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> list[list[Part]]:
    """The lines of a continuation; `steps` has the accepted tokens of each verify step."""
    lines: list[list[Part]] = [[]]
    for text, accepted in _pieces(token_ids, _accepted(len(token_ids), steps), decode):
        marked = f"{BEGIN}{text}{END}" if accepted and text else text
        for number, part in enumerate(marked.split("\n")):
            if number:
                lines.append([])
            lines[-1].append((part, STYLE if accepted else ""))
    return lines


def _accepted(num_tokens: int, steps: Sequence[int]) -> list[bool]:
    """[N] by token: the first is of prefill; a step writes accepted ones, and one of the target.

    A few at the end belong to no whole step.
    """
    marks = [False]
    for accepted in steps:
        marks += [*(True,) * accepted, False]
    return [*marks, *(False,) * num_tokens][:num_tokens]


def _pieces(
    token_ids: Sequence[int], marks: Sequence[bool], decode: Callable[[Sequence[int]], str]
) -> Iterator[tuple[str, bool]]:
    """Text by runs of equal marks; a character of several tokens counts with the last of them."""
    told = ""
    for end, mark in enumerate(marks, start=1):
        if end == len(marks):
            yield decode(token_ids)[len(told) :], mark
        elif marks[end] != mark:
            text = decode(token_ids[:end]).rstrip("\ufffd")
            yield text[len(told) :], mark
            told = text


def print_answer(draft: Path, traces: Path, target: Path) -> None:
    """Show the answer on which the draft is most like its mean."""
    (replayed,) = replay([draft], traces)
    mean = replayed.counts.mean_acceptance_length
    shown = min(
        (prompt for prompt in replayed.prompts if prompt.steps),
        key=lambda prompt: abs(prompt.counts.mean_acceptance_length - mean),
    )
    trace = next(trace for trace in TraceFolder.open(traces) if trace.id == shown.id)
    tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    out = stdout()
    out.line("")
    out.line((f"What {draft.name} proposed and the target accepted of one answer", "bold"))

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

    for line in decode(trace.token_ids[: trace.prompt_length].tolist()).split("\n"):
        out.line((line, "dim"))
    for parts in marked_lines(trace.continuation, shown.steps, decode):
        out.line(*parts)
    accepted, steps = sum(shown.steps), len(shown.steps)
    out.line(
        f"{BEGIN} {END}: {accepted} of {len(trace.continuation)} tokens, in {steps} verify steps; a"
        f" step writes {1 + accepted / steps:.2f} tokens, {mean:.2f} on all prompts"
    )
    out.line("")
