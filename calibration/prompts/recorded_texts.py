"""Texts of a trace folder as prompts: the target goes on behind what it wrote before.

Of a greedy target that is what one longer recording would have held, in two parts: the first part
is a prompt now, and only what is added is counted. A text that goes on knows the conversation that
it began with, so that the gate counts both as one prompt.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ..errors import PromptError
from ..traces.names import LONGEST_NAME, is_printable_name
from ..traces.prompt_trace import prompt_sha256
from ..traces.trace_folder import TraceFolder
from .prompt_choice import EVERY_PROMPT, PromptChoice
from .prompt_file import Prompt

_MORE = "/more"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTexts:
    """Texts that go on.

    Attributes:
        prompts: prompt and answer of each, at least one.
        ended: ids of those that the target has ended itself: nothing follows them.
    """

    prompts: tuple[Prompt, ...]
    ended: tuple[str, ...]


def recorded_texts(
    traces: TraceFolder,
    vocab_size: int,
    ends: Collection[int],
    choice: PromptChoice = EVERY_PROMPT,
) -> RecordedTexts:
    """The texts of traces, each whole, as prompts named ID/more.

    Args:
        traces: of the same tokens; who wrote them does not matter.
        vocab_size: tokens of the target that goes on.
        ends: tokens that end its texts; none where it ignores them.
        choice: which of the texts that have not ended.

    Raises:
        PromptError: the texts are of other tokens, have all ended, or are too few; or a choice is
            one of data sets; or a name becomes too long.
        TraceError: the bytes of token ids changed since recording.
    """
    theirs = traces.manifest.target.vocab_size
    if theirs != vocab_size:
        raise PromptError(
            traces.folder,
            f"its texts are of {theirs:,} tokens, and the target has {vocab_size:,}",
            fix="give the target that was recorded, or the texts as a file of prompts",
        )
    for option, given in (("split", choice.split), ("column", choice.column)):
        if given is not None:
            what = f"belongs to data sets and files, and {traces.folder} holds traces"
            raise PromptError(f"--prompts-{option}", what, fix="leave it out")
    found = tuple(_texts(traces))
    going = [prompt for prompt in found if prompt.token_ids[-1] not in ends]
    ended = tuple(prompt.id.removesuffix(_MORE) for prompt in found if prompt.token_ids[-1] in ends)
    if not going:
        raise PromptError(
            traces.folder,
            f"each of its {len(found)} texts ends with the target's end of text",
            fix="record it with a smaller --max-new-tokens, or go on with --ignore-eos",
        )
    choice.check(traces.folder, len(going))
    chosen = sorted(choice.order(len(going))[: choice.num_prompts])
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
