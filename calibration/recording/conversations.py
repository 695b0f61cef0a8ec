"""Texts that continue: conversations turn by turn, and the texts of a trace folder.

Each answer joins its conversation as text, the next turn of the user follows, and the chat template
turns the whole into the next prompt, as for a client of a server. Every turn is a prompt of its
own, ID/turn-2, that knows the first turn of its conversation.
"""

import dataclasses
import math
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...quantize.files.staging import check_output, remove_stale, staging_name
from ...recipes.errors import LineProblem, PromptError
from ..prompts.prompt_file import Prompt, PromptEncoder
from ..prompts.prompt_forms import EVERY_PROMPT, ChosenPrompts
from ..traces.manifest import LONGEST_NAME, is_printable_name
from ..traces.prompt_trace import PromptTrace, prompt_sha256
from ..traces.sets import copy_traces
from ..traces.trace_folder import TraceFolder
from .target_shape import RecordingPlan

# For a greedy target that is what one longer recording would have held, in two parts: the first
# part is a prompt now, and only what is added is counted. A text that goes on knows the
# conversation that it began with, so that the gate counts both as one prompt.

_MORE = "/more"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTexts:
    """Texts to continue, at least one, and the ids of those that the target has ended itself."""

    prompts: tuple[Prompt, ...]
    ended: tuple[str, ...]


def recorded_texts(
    traces: TraceFolder,
    vocab_size: int,
    ends: Collection[int],
    choice: ChosenPrompts = EVERY_PROMPT,
) -> RecordedTexts:
    """The texts of traces, each whole, as prompts named ID/more."""
    theirs = traces.manifest.target.vocab_size
    if theirs != vocab_size:
        what = f"its texts are of {theirs:,} tokens, and the target has {vocab_size:,}"
        fix = "give the target that was recorded, or the texts as a file of prompts"
        raise PromptError(traces.folder, what, fix=fix)
    for option, given in (("split", choice.prompts_split), ("column", choice.prompts_column)):
        if given is not None:
            what = f"belongs to data sets and files, and {traces.folder} holds traces"
            raise PromptError(f"--prompts-{option}", what, fix="leave it out")
    texts = tuple(_texts(traces))
    going = [prompt for prompt in texts if prompt.token_ids[-1] not in ends]
    ended = tuple(prompt.id.removesuffix(_MORE) for prompt in texts if prompt.token_ids[-1] in ends)
    if not going:
        raise PromptError(
            traces.folder,
            f"each of its {len(texts)} texts ends with the target's end of text",
            fix="record it with a smaller --max-new-tokens, or go on with --ignore-eos",
        )
    chosen = choice.taken(traces.folder, len(going))
    return RecordedTexts(prompts=tuple(going[place] for place in chosen), ended=ended)


def _texts(traces: TraceFolder) -> Iterator[Prompt]:
    for entry, tensor in traces.token_ids():
        token_ids = tuple(tensor.tolist())
        first = prompt_sha256(token_ids[: entry.prompt_length])
        if not is_printable_name(name := entry.id + _MORE):
            raise PromptError(
                traces.folder,
                f"prompt {entry.id}: with {_MORE!r} its id has more than {LONGEST_NAME} characters",
                fix="record it from a file, with shorter ids",
            )
        yield Prompt(
            id=name,
            category=entry.category,
            token_ids=token_ids,
            cluster=entry.cluster,
            conversation_sha256=entry.conversation_sha256 or first,
        )


Record = Callable[[Sequence[Prompt], Path], TraceFolder]
"""Records prompts into a new folder, greedily or sampled, with any engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationReport:
    """Recorded conversations, and how many the target lacks positions for."""

    traces: TraceFolder
    num_turns: tuple[int, ...]
    num_cut_short: int


def record_conversations(plan: RecordingPlan, out: Path, record: Record) -> ConversationReport:
    """Record all turns of prompts with later turns, and the other prompts unchanged.

    The turns come in the order of the prompts, those of a conversation together.
    """
    check_output(out)
    prompts, encoder, positions = plan.prompts, PromptEncoder(plan.target), plan.shape.max_positions
    longest = math.inf if positions is None else positions - plan.max_new_tokens
    with _scratch(out) as scratch:
        rounds: list[TraceFolder] = []
        going, cut_short = list(prompts), 0
        while going:
            rounds.append(record(going, scratch / f"turn-{len(rounds) + 1}"))
            answered = zip(going, rounds[-1], strict=True)
            later = [_next_turn(p, trace, encoder) for p, trace in answered if p.later_turns]
            going = [p for p in later if len(p.token_ids) <= longest]
            cut_short += len(later) - len(going)
        traces = copy_traces(rounds, out, _in_order(prompts, rounds))
    return ConversationReport(
        traces=traces, num_turns=tuple(map(len, rounds)), num_cut_short=cut_short
    )


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """A folder for the rounds, named so that `clean` recognises what a killed run left."""
    name = f"{out.name}.turns"
    remove_stale(out.parent, name)
    folder = out.parent / staging_name(name)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _next_turn(prompt: Prompt, trace: PromptTrace, encoder: PromptEncoder) -> Prompt:
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
        prompt, token_ids=tuple(token_ids), messages=messages, later_turns=prompt.later_turns[1:]
    )


def _in_order(prompts: Sequence[Prompt], rounds: Sequence[TraceFolder]) -> Iterator[PromptTrace]:
    """The turns of the first prompt, then those of the second, ..., with their ids."""
    entries = [{entry.id: entry for entry in folder.manifest.prompts} for folder in rounds]
    for prompt in prompts:
        first: str | None = None
        for turn, (traces, by_id) in enumerate(zip(rounds, entries, strict=True), start=1):
            if prompt.id not in by_id:
                continue
            trace = traces.load(by_id[prompt.id])
            if prompt.later_turns:
                trace = dataclasses.replace(
                    trace, id=f"{prompt.id}/turn-{turn}", conversation_sha256=first
                )
            first = first or trace.prompt_sha256
            yield trace
