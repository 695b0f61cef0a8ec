"""What `draftquant replay --json` prints, read again: every draft with its counts per prompt."""

from dataclasses import dataclass
from pathlib import Path

from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, decode, parse_json
from ..counting.acceptance_counts import AcceptanceCounts
from ..counting.estimand import DraftSampling
from ..errors import CompareError
from ..report.contradictions import MOST_DRAFT_TOKENS, is_histogram
from ..report.judgements import RecordedText


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedPrompt:
    """One prompt; `num_steps` is the sum of `histogram`, which has K + 1 columns."""

    id: str
    category: str
    prompt_sha256: str
    num_steps: float
    histogram: tuple[float, ...]
    cluster: str = ""

    @property
    def counts(self) -> AcceptanceCounts:
        """Of its rounds."""
        return AcceptanceCounts(histogram=self.histogram)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedDraft:
    """One draft; keys as `replay --json` has them."""

    name: str
    mean_acceptance_length: float
    draft_acceptance_rate: float
    num_steps: float
    num_emitted_tokens: float
    histogram: tuple[float, ...]
    survival: tuple[float, ...]
    conditional: tuple[float | None, ...]
    every_position_mean_acceptance_length: float | None
    estimand: str
    num_draft_tokens: int
    draft_sampling: DraftSampling
    traces: RecordedText
    first_step_agreement: float
    prompts: tuple[ReplayedPrompt, ...]
    rope_theta: float | None
    dtype: str

    def problem(self) -> str:
        """What no replay says; empty for what one may say."""
        depth = self.num_draft_tokens
        if not 1 <= depth <= MOST_DRAFT_TOKENS:
            return f"num_draft_tokens: expected 1 to {MOST_DRAFT_TOKENS}, got {depth}"
        for prompt in self.prompts:
            if prompt.num_steps and not is_histogram(prompt.histogram, depth):
                return f"prompts: {prompt.id!r}: expected {depth + 1} counts of rounds"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replays:
    replays: tuple[ReplayedDraft, ...]


def read_replays(path: Path) -> tuple[ReplayedDraft, ...]:
    """Read what `replay --json` printed.

    Raises:
        CompareError: it cannot be read, or is something else.
    """
    try:
        found: _Replays = decode(_Replays, {"replays": parse_json(read_text(path))})
    except (OSError, JsonProblem) as exc:
        raise CompareError(
            path,
            f"is no list of replays: {exc}",
            fix="give what 'draftquant replay --json' printed",
        ) from exc
    return found.replays
