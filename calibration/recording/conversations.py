"""Conversations: the target answers every turn of the user, each on top of its own answers before.

Round by round: the first turns are recorded, each answer joins its conversation as text, the next
turn of the user follows, and the chat template makes of the whole the prompt of the next round, as
a client of a server would. Every turn is a prompt of its own, ID/turn-2, that knows the first turn
of its conversation: the gate counts them as one prompt, a split keeps them on one side.
"""

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...quantize.errors import CheckpointError
from ...quantize.files.checkpoint import CONFIG_FILE, read_json_object
from ...quantize.files.hub import no_target
from ...quantize.files.staging import check_output
from ...quantize.files.staging_names import remove_stale, staging_name
from ..errors import LineProblem, PromptError
from ..prompts.prompt_file import Prompt, PromptEncoder
from ..traces.prompt_trace import PromptTrace
from ..traces.sets import copy_traces
from ..traces.trace_folder import TraceFolder

Record = Callable[[Sequence[Prompt], Path], TraceFolder]
"""Records prompts into a new folder, greedily or sampled, with whatever engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationReport:
    """Conversations that are recorded.

    Attributes:
        traces: the folder that was written, opened.
        num_turns: prompts of each round, the first round first.
        num_cut_short: conversations with turns left that the target has no positions for.
    """

    traces: TraceFolder
    num_turns: tuple[int, ...]
    num_cut_short: int


def record_conversations(
    prompts: Sequence[Prompt],
    target: Path,
    out: Path,
    record: Record,
    *,
    max_new_tokens: int,
) -> ConversationReport:
    """Record all turns of prompts that have later ones, and the others as they are.

    Args:
        prompts: as read, with their messages and later turns.
        target: folder of the target: its tokenizer and how many positions it has.
        record: called once for every round.
        max_new_tokens: that `record` adds.

    Returns:
        The turns in the order of the prompts, those of a conversation together.

    Raises:
        PromptError: a conversation cannot be put through the chat template.
        TraceError, CheckpointError: as of `record`.
        OutputError: `out` exists already, or its parent does not.
    """
    check_output(out)
    encoder, positions = PromptEncoder(target), _num_positions(target)
    with _scratch(out) as scratch:
        rounds: list[TraceFolder] = []
        going, cut_short = list(prompts), 0
        while going:
            rounds.append(record(going, scratch / f"turn-{len(rounds) + 1}"))
            answered = zip(going, rounds[-1], strict=True)
            later = [_next_turn(p, trace, encoder) for p, trace in answered if p.later_turns]
            going = [p for p in later if len(p.token_ids) + max_new_tokens <= positions]
            cut_short += len(later) - len(going)
        traces = copy_traces(rounds, out, _in_order(prompts, rounds))
    return ConversationReport(
        traces=traces, num_turns=tuple(map(len, rounds)), num_cut_short=cut_short
    )


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """A folder for the rounds, named so that `clean` knows what a killed run left."""
    name = f"{out.name}.turns"
    remove_stale(out.parent, name)
    folder = out.parent / staging_name(name)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _next_turn(prompt: Prompt, trace: PromptTrace, encoder: PromptEncoder) -> Prompt:
    """The conversation with the target's answer and the user's next turn."""
    messages = (
        *prompt.messages,
        {"role": "assistant", "content": encoder.answer(trace.continuation)},
        {"role": "user", "content": prompt.later_turns[0]},
    )
    try:
        token_ids = encoder.messages(messages)
    except LineProblem as exc:
        raise PromptError(
            f"prompt {prompt.id}", str(exc), fix="record the first turns alone: --turns first"
        ) from exc
    return dataclasses.replace(
        prompt,
        token_ids=tuple(token_ids),
        messages=messages,
        later_turns=prompt.later_turns[1:],
    )


def _in_order(prompts: Sequence[Prompt], rounds: Sequence[TraceFolder]) -> Iterator[PromptTrace]:
    """The turns of the first prompt, then those of the second, ..., with their ids."""
    entries = [{entry.id: entry for entry in one.manifest.prompts} for one in rounds]
    for prompt in prompts:
        first: str | None = None
        for turn, (traces, found) in enumerate(zip(rounds, entries, strict=True), start=1):
            if prompt.id not in found:
                continue
            trace = traces.load(found[prompt.id])
            if prompt.later_turns:
                trace = dataclasses.replace(
                    trace, id=f"{prompt.id}/turn-{turn}", conversation_sha256=first
                )
            first = first or trace.prompt_sha256
            yield trace


def _num_positions(target: Path) -> float:
    """How many tokens the target can read; no limit where its config says none."""
    try:
        config = read_json_object(target / CONFIG_FILE, no_target(target))
    except CheckpointError as exc:
        raise PromptError(exc.where, exc.what, fix=exc.fix) from exc
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    found = text.get("max_position_embeddings")
    return found if isinstance(found, int) else float("inf")
