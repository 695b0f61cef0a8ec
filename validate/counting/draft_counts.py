"""What is judged of a draft, replayed or served: its counts prompt by prompt, and of what text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .acceptance_counts import AcceptanceCounts


class PromptCounts(Protocol):
    """One prompt under one draft."""

    @property
    def id(self) -> str:
        """Of the prompt."""

    @property
    def category(self) -> str:
        """Of the prompt."""

    @property
    def prompt_sha256(self) -> str:
        """Of its token ids: copies of it, and turns of one conversation, have the same."""

    @property
    def cluster(self) -> str:
        """The same for prompts that are no independent samples; "" = those of its hash alone."""

    @property
    def counts(self) -> AcceptanceCounts:
        """Of its rounds; whole numbers unless they are expected or weighted."""


class TextFigures(Protocol):
    """What is known of the text that was written, whatever the draft."""

    @property
    def mean_token_probability(self) -> float | None:
        """Of the emitted tokens under the target; None for greedy text, or where not known."""

    @property
    def num_near_duplicates(self) -> int:
        """Distinct prompts that hardly differ from others, as far as it is known."""

    def problem(self) -> str | None:
        """Why no draft can be judged by it, without a full stop; None = nothing is known."""


class DraftCounts(Protocol):
    """One draft over all prompts."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def num_draft_tokens(self) -> int:
        """K."""

    @property
    def prompts(self) -> Sequence[PromptCounts]:
        """In an order that both drafts of a comparison share."""

    @property
    def counts(self) -> AcceptanceCounts:
        """Pooled over the prompts."""

    @property
    def text(self) -> TextFigures:
        """That was drafted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """What a verdict calls the way in which drafts were counted.

    Attributes:
        both_again: how both drafts are counted so that they can be compared, a sentence.
        take: what is done with a fresh set of prompts, capital letter.
        longer: how a prompt gets more rounds.
    """

    both_again: str
    take: str
    longer: str


REPLAYED = Wording(
    both_again="Replay both drafts in one run, with one K.",
    take="Record",
    longer="record longer continuations (record --max-new-tokens), or judge a smaller K",
)
