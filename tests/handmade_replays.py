"""Replays made by hand, for the gate: histograms in, and prompts that differ unless told."""

from collections.abc import Sequence
from typing import Any

from draftquant.calibration.traces.feature_evidence import FeatureEvidence
from draftquant.calibration.traces.prompt_trace import prompt_sha256
from draftquant.validate.counting.acceptance_counts import AcceptanceCounts
from draftquant.validate.counting.draft_counts import (
    DraftReplay,
    FirstStepAgreement,
    PromptReplay,
    TraceFigures,
)
from draftquant.validate.judging.policy import POLICIES
from test_traces import TARGET

RELEASE = POLICIES["release"]
FIGURES = TraceFigures(
    sha256="0" * 64,
    target=TARGET,
    temperature=0,
    sampling=None,
    mean_token_probability=None,
    repeated_8gram_share=0.1,
    num_near_duplicates=0,
    features=FeatureEvidence(repeats=0, constant=False, share={0: 0.0}),
)


def replay(
    histograms: list[tuple[int, ...]],
    *,
    name: str = "draft",
    categories: str = "a",
    texts: Sequence[int] | None = None,
    **changes: Any,
) -> DraftReplay:
    """A draft's replay with these counts; prompts of equal `texts` are copies, default: none is."""
    texts = texts or range(len(histograms))
    prompts = tuple(
        PromptReplay(
            id=f"p{i}",
            category=categories[i % len(categories)],
            prompt_sha256=prompt_sha256([texts[i]]),
            counts=AcceptanceCounts(histogram=histogram),
            every_position=AcceptanceCounts(histogram=histogram),
        )
        for i, histogram in enumerate(histograms)
    )
    first_step = FirstStepAgreement(
        num_rows=10, num_equal=9, num_only_reference_hits=1, num_only_this_hits=0
    )
    own: Any = {"name": name, "num_draft_tokens": len(histograms[0]) - 1, "prompts": prompts}
    return DraftReplay(**{**own, "traces": FIGURES, "first_step": first_step, **changes})


def spread(base: int, count: int = 40) -> list[tuple[int, ...]]:
    """K = 1 prompts of 1000 steps that differ: accept base, base + 1, ... base + 4 of them."""
    return [(1000 - base - i % 5, base + i % 5) for i in range(count)]


BASELINE = spread(600)  # mean acceptance length 1.602


def noisy(drop: int, noise: int, count: int = 40) -> list[tuple[int, ...]]:
    """The baseline with `drop` fewer accepted tokens per prompt, alternating by +-noise."""
    signs = [noise if i % 2 else -noise for i in range(count)]
    return [
        (rejected + drop + sign, accepted - drop - sign)
        for (rejected, accepted), sign in zip(spread(600, count), signs, strict=True)
    ]
