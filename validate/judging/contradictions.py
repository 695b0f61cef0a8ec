"""What no gate says: figures of a report file that contradict themselves."""

import math
from collections.abc import Sequence

from ...recipes.bounds import CONFIDENCE
from ..counting.context_bins import ContextBins
from ..counting.paired_change import PairedChange
from .figures import DraftFigures, PromptFigures
from .verdict import EXIT_CODES, Verdict

MOST_DRAFT_TOKENS = 1000
_LARGEST_LOG = 20.0  # of a ratio: acceptance lengths lie in [1, K + 1]
_ROUNDING = 1e-9
_MOST_ROUNDS = 1e12  # of a prompt: sums of them are exact


def exit_code_problem(verdict: Verdict, exit_code: int) -> str:
    """What is wrong with an exit code; empty if nothing."""
    expected = EXIT_CODES[verdict]
    return "" if exit_code == expected else f"exit_code: {verdict} has {expected}, got {exit_code}"


def comparison_problem(
    *,
    num_draft_tokens: int = 1,
    drafts: Sequence[DraftFigures] = (),
    changes: Sequence[PairedChange | None] = (),
    limits: Sequence[float] = (),
    prompts: Sequence[PromptFigures] = (),
    context_edges: Sequence[int] = (),
    bins_add_up: bool = True,
) -> str:
    """The first contradiction of a comparison; empty if there is none.

    Args:
        drafts: pooled figures, of K positions each.
        changes: of acceptance lengths, as logarithms.
        limits: shares that may be lost.
        prompts: with histograms of K + 1 columns.
        bins_add_up: the bins of a prompt are its histogram; else they were weighed on their own.
    """
    if not 1 <= num_draft_tokens <= MOST_DRAFT_TOKENS:
        return f"num_draft_tokens: expected 1 to {MOST_DRAFT_TOKENS}, got {num_draft_tokens}"
    for figures in drafts:
        # Drafts that cannot be compared may have drafted with another K each.
        if problem := _figures_problem(
            figures, num_draft_tokens if prompts else max(1, len(figures.histogram) - 1)
        ):
            return problem
    for change in changes:
        if change is not None and (problem := _change_problem(change)):
            return problem
    if not all(0 < limit < 1 for limit in limits):
        return "max_relative_drop: expected a share in (0, 1)"
    for prompt in prompts:
        for histogram in (prompt.baseline, prompt.candidate):
            if (
                not is_histogram(histogram, num_draft_tokens)
                or not 1 <= sum(histogram) < _MOST_ROUNDS
            ):
                expected = f"expected {num_draft_tokens + 1} counts of verify steps"
                return f"prompts: {prompt.id!r}: {expected}"
        for name, whole, bins in (
            ("baseline_context_bins", prompt.baseline, prompt.baseline_context_bins),
            ("candidate_context_bins", prompt.candidate, prompt.candidate_context_bins),
        ):
            if problem := context_bins_problem(whole, bins, context_edges, add_up=bins_add_up):
                return f"prompts: {prompt.id!r}: {name}: {problem}"
    return ""


def context_bins_problem(
    whole: Sequence[float],
    histograms: Sequence[Sequence[float]],
    edges: Sequence[int],
    *,
    add_up: bool,
) -> str:
    """What is wrong with the context bins of a prompt; empty if nothing.

    Args:
        whole: [K + 1] verify steps of the prompt.
        histograms: [bins, K + 1] by context bin; none if they are not known.
    """
    if problem := ContextBins(edges=tuple(edges)).problem():
        return f"context_edges: {problem}"
    if not histograms:
        return ""
    if len(histograms) > len(edges) + 1:
        return f"expected at most {len(edges) + 1} bins, got {len(histograms)}"
    for own in histograms:
        if len(own) != len(whole) or min(own) < 0 or not sum(own) < _MOST_ROUNDS:
            return f"expected {len(whole)} counts of verify steps"
    sums = map(sum, zip(*histograms, strict=True))
    if add_up and not all(map(_near, sums, whole)):
        return "expected bins that add up to the counts of the prompt"
    return ""


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=_ROUNDING)


def _figures_problem(figures: DraftFigures, num_draft_tokens: int) -> str:
    if not 1 <= figures.mean_acceptance_length <= num_draft_tokens + 1 + _ROUNDING:
        return f"mean_acceptance_length: expected 1 to {num_draft_tokens + 1}"
    if not is_histogram(figures.histogram, num_draft_tokens):
        return f"histogram: expected {num_draft_tokens + 1} counts of verify steps"
    for name, shares in (("survival", figures.survival), ("conditional", figures.conditional)):
        fits = all(share is None or 0 <= share <= 1 + _ROUNDING for share in shares)
        if len(shares) != num_draft_tokens or not fits:
            return f"{name}: expected {num_draft_tokens} shares in [0, 1]"
    return ""


def is_histogram(counts: Sequence[float], num_draft_tokens: int) -> bool:
    """Whether these are counts of at least one round by number of accepted tokens, 0 to K."""
    return len(counts) == num_draft_tokens + 1 and min(counts) >= 0 and 0 < sum(counts) < 1e18


def _change_problem(change: PairedChange) -> str:
    bounds = (change.lower - _ROUNDING, change.log_ratio, change.upper + _ROUNDING)
    if sorted(bounds) != list(bounds) or max(map(abs, bounds)) > _LARGEST_LOG:
        return "change: expected lower <= log_ratio <= upper, logarithms of ratios"
    problem = CONFIDENCE.problem(change.confidence)
    return f"confidence: {problem}" if problem else ""
