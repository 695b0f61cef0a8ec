"""Whether a quantized draft proposes what BF16 proposes: figures with bounds, and their limits.

These are alarms rather than a release gate: they see ten times smaller changes than acceptance
length does, and not always in the same direction.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..counting.jackknife import Bounded, pooled_mean
from .draft_agreement import ACCEPTED, PromptAgreement, Quantity
from .finding import Finding
from .limits import MIN_PROMPTS, Limits, judged, limits

Floats = NDArray[np.float64]
Sums = Mapping[Quantity, Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """What quantizing may change; None = not judged.

    Attributes:
        max_kl: mean KL(BF16 || quantized).
        min_agreement: share of equal most likely tokens.
        min_top_agreement: shared part of the most likely tokens.
        min_overlap: mean sum of the smaller probabilities.
        max_right_drop: how much less often the most likely token is the target's, as a share.
        max_perplexity_rise: of the draft on the target's tokens, in nats of its logarithm, which
            for small values is the relative rise.
        max_alpha_drop: of the expected acceptance of drawn proposals, as a share.
    """

    max_kl: float | None = None
    min_agreement: float | None = None
    min_top_agreement: float | None = None
    min_overlap: float | None = None
    max_right_drop: float | None = None
    max_perplexity_rise: float | None = None
    max_alpha_drop: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    """One figure: the mean of a quantity of `Quantity`, or of a change of it.

    Attributes:
        what: for people.
        total: [...] of sums; divided by those of `per`.
        sides: the quantity of BF16 and of the quantized draft, where the figure is a change.
    """

    what: str
    allowed: Limits
    total: Callable[[Sums], Floats]
    per: Quantity = "rows"
    sides: tuple[Quantity, Quantity] | None = None


def draft_findings(
    prompts: Sequence[PromptAgreement],
    allowed: DraftLimits,
    *,
    top: int,
    confidence: float,
    min_prompts: int = MIN_PROMPTS,
) -> tuple[Finding, ...]:
    """Judge every figure over all rows; steps and categories stand in the details.

    Args:
        prompts: of `draft_agreement`.
        top: as `draft_agreement` was told.
        confidence: of each one-sided bound, in (0.5, 1); conversations are the unit of sampling.

    Returns:
        One finding per figure; none of acceptance where the traces do not tell it.

    Raises:
        ParityError: a limit is out of range.
    """
    sampled = all(name in prompts[0].sums for name in ACCEPTED)
    figures = [f for f in _figures(allowed, top) if sampled or f.sides != ACCEPTED]
    return tuple(_finding(figure, prompts, confidence, min_prompts) for figure in figures)


def check_limits(allowed: DraftLimits) -> None:
    """Check, before any work, what `draft_findings` will be asked for.

    Raises:
        ParityError: a limit is out of range.
    """
    list(_figures(allowed, 1))


def _figures(allowed: DraftLimits, top: int) -> Iterator[_Figure]:
    share = (0.0, 1.0)
    yield _Figure(
        what="KL(BF16 || quantized)",
        allowed=limits("--max-kl", allowed.max_kl, most=1),
        total=lambda s: s["divergence"],
    )
    yield _Figure(
        what="top-1 agreement",
        allowed=limits("--min-agreement", allowed.min_agreement, of=share, least=1),
        total=lambda s: s["same_first"],
    )
    yield _Figure(
        what=f"top-{top} agreement",
        allowed=limits("--min-top-agreement", allowed.min_top_agreement, of=share, least=1),
        total=lambda s: s["same_top"],
    )
    yield _Figure(
        what="overlap",
        allowed=limits("--min-overlap", allowed.min_overlap, of=share, least=1),
        total=lambda s: s["overlap"],
    )
    yield _change(
        "right tokens, change",
        limits("--max-right-drop", allowed.max_right_drop, of=share, least=-1),
        ("right_baseline", "right_candidate"),
    )
    yield _change(
        "log perplexity, change",
        limits("--max-perplexity-rise", allowed.max_perplexity_rise, most=1),
        ("surprise_baseline", "surprise_candidate"),
        per="proposable",
    )
    yield _change(
        "alpha, change",
        limits("--max-alpha-drop", allowed.max_alpha_drop, of=share, least=-1),
        ACCEPTED,
    )


def _change(
    what: str, allowed: Limits, sides: tuple[Quantity, Quantity], per: Quantity = "rows"
) -> _Figure:
    before, after = sides
    return _Figure(
        what=what, allowed=allowed, total=lambda s: s[after] - s[before], per=per, sides=sides
    )


def _finding(
    figure: _Figure, prompts: Sequence[PromptAgreement], confidence: float, min_prompts: int
) -> Finding:
    num_steps = len(prompts[0].sums["rows"])
    slices: list[tuple[dict[str, object], Sequence[PromptAgreement], slice]] = [
        ({"step": step + 1}, prompts, slice(step, step + 1)) for step in range(num_steps)
    ]
    slices += [
        ({"category": name}, [p for p in prompts if p.category == name], slice(None))
        for name in sorted({p.category for p in prompts})
    ]
    details = []
    for named, some, steps in slices:
        found = _bounded(figure, some, steps, confidence)
        if found is not None:
            details.append(named | _plain(found) | _sides(figure, some, steps))
    whole = _bounded(figure, prompts, slice(None), confidence)
    if whole is None:
        return Finding(
            check="draft",
            what=figure.what,
            estimate=None,
            threshold=None,
            verdict="INCONCLUSIVE",
            reason="No recorded token is in the drafts' vocabulary.",
        )
    return judged(
        "draft",
        figure.what,
        whole,
        figure.allowed,
        min_clusters=min_prompts,
        remedy="record more prompts",
        details=details,
    )


def _bounded(
    figure: _Figure, prompts: Sequence[PromptAgreement], steps: slice, confidence: float
) -> Bounded | None:
    """Pooled over rows, with conversations as clusters; None where there is no row."""
    clusters: dict[str, tuple[float, float]] = {}
    for prompt in prompts:
        sums: Sums = {name: each[steps].numpy() for name, each in prompt.sums.items()}
        total, count = float(figure.total(sums).sum()), float(sums[figure.per].sum())
        before = clusters.get(prompt.prompt_sha256, (0.0, 0.0))
        clusters[prompt.prompt_sha256] = (before[0] + total, before[1] + count)
    counted = [pair for pair in clusters.values() if pair[1] > 0]
    if not counted:
        return None
    totals, counts = zip(*counted, strict=True)
    return pooled_mean(totals, counts, confidence=confidence)


def _plain(found: Bounded) -> dict[str, object]:
    return {
        "estimate": found.estimate,
        "lower": found.lower if found.has_spread else None,
        "upper": found.upper if found.has_spread else None,
        "prompts": found.num_clusters,
    }


def _sides(figure: _Figure, prompts: Sequence[PromptAgreement], steps: slice) -> dict[str, object]:
    """The two means that a change is between."""
    if figure.sides is None:
        return {}
    count = sum(float(p.sums[figure.per][steps].sum()) for p in prompts)
    means = (
        sum(float(p.sums[side][steps].sum()) for p in prompts) / count for side in figure.sides
    )
    return dict(zip(("baseline", "candidate"), means, strict=True))
