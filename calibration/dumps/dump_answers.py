"""The answers in a text: what the target is said to have written, each with all before as prompt.

A run of the loss mask is an answer, whatever stands between two of them: later turns of the user,
or tokens inside an answer that training leaves out. Features look back only, so the beginning of a
text with its features is a trace of its own.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import TraceError
from ..prompts.prompt_file import Prompt
from .sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """Tokens `start` to `stop` - 1 of a sample, with the tokens before as their prompt.

    Attributes:
        id: of the sample, with the number of the turn where it has several answers.
        category: of the prompt file, else "all".
        first_start: prompt length of the sample's first answer: the conversation's own prompt.
    """

    id: str
    category: str
    sample: Sample
    start: int
    stop: int
    first_start: int


class Answers:
    """Finds the answers of samples.

    Args:
        ends: token ids that end an answer; what follows one in the mask is the template's.
        prompts: the prompts that the dump was made with, where given; a sample belongs to the
            longest that it begins with. They give ids, categories, and where prompts end if the
            dump does not.
    """

    def __init__(self, ends: Collection[int], prompts: Sequence[Prompt] | None) -> None:
        self._ends = torch.tensor(sorted(ends), dtype=torch.int64)
        self._prompts: Mapping[tuple[int, ...], Prompt] | None = (
            None if prompts is None else {prompt.token_ids: prompt for prompt in prompts}
        )
        self._lengths = sorted({len(ids) for ids in self._prompts or ()}, reverse=True)
        self._taken: set[str] = set()

    def of(self, sample: Sample) -> Iterator[Answer]:
        """The answers of one sample, in order; none where it has no answer with a token.

        Raises:
            TraceError: nothing says where its prompt ends.
        """
        prompt = self._prompt_of(sample)
        runs = self._runs(sample, prompt)
        name = sample.id if prompt is None else prompt.id
        if name in self._taken:
            name = f"{name}/{sample.id}"
        self._taken.add(name)
        for turn, (start, stop) in enumerate(runs, start=1):
            yield Answer(
                id=f"{name}/turn-{turn}" if len(runs) > 1 else name,
                category=prompt.category if prompt else "all",
                sample=sample,
                start=start,
                stop=stop,
                first_start=runs[0][0],
            )

    def _runs(self, sample: Sample, prompt: Prompt | None) -> list[tuple[int, int]]:
        answered, count = sample.answered, len(sample.token_ids)
        if answered is not None and not bool(answered.any()):
            return []
        if answered is None or bool(answered[0]):
            if prompt is None:
                why = "has no loss mask" if answered is None else "begins with an answer"
                raise TraceError(
                    sample.file,
                    f"the text {why}, so it is unknown where its prompt ends",
                    fix="give the prompts as they were sent, with their token ids: --prompts P",
                )
            answered = torch.arange(count) >= len(prompt.token_ids)
        steps = torch.diff(torch.nn.functional.pad(answered.long(), (1, 1)))
        starts, stops = ((steps == sign).nonzero()[:, 0].tolist() for sign in (1, -1))
        return [
            (start, self._end(sample, start, stop))
            for start, stop in zip(starts, stops, strict=True)
        ]

    def _end(self, sample: Sample, start: int, stop: int) -> int:
        """Up to and with the first token that ends an answer."""
        ends = torch.isin(sample.token_ids[start:stop], self._ends).nonzero()
        return start + int(ends[0]) + 1 if len(ends) else stop

    def _prompt_of(self, sample: Sample) -> Prompt | None:
        if self._prompts is None:
            return None
        for length in self._lengths:
            found = self._prompts.get(tuple(sample.token_ids[:length].tolist()))
            if found is not None:
                return found
        raise TraceError(
            sample.file,
            "the text begins with none of the prompts of --prompts",
            fix="give the prompts that were sent, with the same token ids: --prompts P",
        )
