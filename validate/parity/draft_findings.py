"""Whether a quantized draft proposes what BF16 proposes: figures with bounds, and their limits.

Both drafts are teacher-forced along the recorded tokens. These are alarms rather than a release
gate: they detect ten times smaller changes than acceptance length, not always in its direction.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from ...calibration.passes.draft_inputs import check_trace_fits, first_hidden, rows_along, work_of
from ...calibration.passes.proposals import MAX_LOGITS, draft_ids_of, num_draft_tokens_fault
from ...calibration.traces.prompt_trace import PromptTrace
from ...calibration.traces.trace_folder import TraceFolder
from ...quantize.drafts.forward import finite, positions
from ...quantize.stored.loading import LoadedDraft
from ...recipes.errors import ParityError
from ...recipes.listener import Progress, unseen
from ..counting.paired_change import Bounded, Floats, pooled_mean
from ..counting.trace_replay import acceptance_probabilities
from .finding import DraftLimits, Limits, ParityFinding, judged, limits

Quantity = Literal[
    "rows", "divergence", "same_first", "same_top", "overlap", "right_baseline", "right_candidate",
    "proposable", "surprise_baseline", "surprise_candidate", "accepted_baseline",
    "accepted_candidate",
]  # fmt: skip
"""What is added up over rows, at each step:

rows                 1
divergence           KL(BF16 || quantized) = sum p log(p / q), nats
same_first           1 where both find the same token most likely
same_top             share of the `top` most likely tokens that both have
overlap              sum min(p, q): how often both draw the same token, coupled as well as can be
right_X              1 where X's most likely token is the recorded one
proposable           1 where the recorded token is in the drafts' vocabulary
surprise_X           -log of X's probability of the recorded token, of proposable ones, nats
accepted_X           min(1, X's probability / the target's) of the recorded token of drawn text
"""

DEFAULT_TOP = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptAgreement:
    """One recorded prompt: [K] float64 sums of each quantity, without `accepted_*` if unknown."""

    category: str
    prompt_sha256: str
    sums: Mapping[Quantity, Tensor]


def check_comparable(
    baseline: LoadedDraft, candidate: LoadedDraft, traces: TraceFolder, num_draft_tokens: int
) -> None:
    """Refuse drafts that cannot propose K tokens here, or that differ in their vocabulary."""
    for draft in (baseline, candidate):
        fault = num_draft_tokens_fault(draft.geometry, num_draft_tokens)
        if fault:
            raise ParityError(f"{draft.name}: --num-draft-tokens", fault[0], fix=fault[1])
        check_trace_fits(draft, traces)
    if not torch.equal(_vocabulary(baseline), _vocabulary(candidate)):
        what = f"proposes tokens of another vocabulary than {baseline.name}"
        fix = "give the BF16 draft that it was quantized from"
        raise ParityError(candidate.name, what, fix=fix)


@torch.inference_mode()
def draft_agreement(
    baseline: LoadedDraft,
    candidate: LoadedDraft,
    traces: TraceFolder,
    *,
    num_draft_tokens: int,
    top: int = DEFAULT_TOP,
    on_progress: Progress = unseen,
) -> tuple[PromptAgreement, ...]:
    """Run both drafts along every prompt that has K tokens to propose; `top` tokens are one set."""
    check_comparable(baseline, candidate, traces, num_draft_tokens)
    if not 1 <= top <= baseline.forward.num_logits:
        most = baseline.forward.num_logits
        raise ParityError("--top", f"expected 1 to {most:,} (the drafts' vocabulary), got {top}",
                          fix=f"leave it out for the default, {DEFAULT_TOP}")  # fmt: skip
    agreements = []
    work = [work_of([entry], num_draft_tokens) for entry in traces.manifest.prompts]
    for done, entry in zip(accumulate(work), traces.manifest.prompts, strict=True):
        trace = traces.load(entry)
        rows = rows_along(trace, num_draft_tokens)
        if rows:
            sums = _sums((baseline, candidate), traces, trace, rows, num_draft_tokens, top)
            agreements.append(
                PromptAgreement(
                    category=trace.category, prompt_sha256=trace.cluster_sha256, sums=sums
                )
            )
        on_progress(done, sum(work))
    if not agreements:
        what = f"no continuation is longer than --num-draft-tokens {num_draft_tokens}"
        raise ParityError(traces.folder, what, fix="record longer continuations")
    return tuple(agreements)


def _sums(
    drafts: tuple[LoadedDraft, LoadedDraft],
    traces: TraceFolder,
    trace: PromptTrace,
    rows: range,
    num_draft_tokens: int,
    top: int,
) -> dict[Quantity, Tensor]:
    """[K] of each quantity; at most some rows of logits are held."""
    first, *_ = drafts
    forward, device = first.forward, first.device
    token_ids = trace.token_ids.to(device)
    draft_ids = draft_ids_of(forward, token_ids)
    manifest, recorded = traces.manifest, None
    if manifest.logprobs_as_sampled and trace.token_logprob is not None:
        recorded = trace.token_logprob.to(device)
    sums: dict[Quantity, Tensor] = defaultdict(
        lambda: torch.zeros(num_draft_tokens, dtype=torch.float64)
    )
    passes = [
        draft.forward.passes(
            first_hidden(draft, traces, trace)[None],
            token_ids[None],
            rows=rows,
            num_draft_tokens=num_draft_tokens,
        )
        for draft in drafts
    ]
    for both in zip(*passes, strict=True):
        depths = both[0].depths
        places = positions(both[0].rows, device)[:, None] + 2 + positions(depths, device)
        together = max(1, MAX_LOGITS // (forward.num_logits * len(depths)))
        for start in range(0, len(places), together):
            part = slice(start, start + together)
            at = places[part]
            logits = [
                _logits(draft, drafted.hidden[0, part])
                for draft, drafted in zip(drafts, both, strict=True)
            ]
            values = list(_quantities(logits, draft_ids[token_ids[at]], top))
            if recorded is not None and manifest.temperature is not None:
                logprob = recorded[at - trace.prompt_length]
                values += _accepted(logits, draft_ids[token_ids[at]], logprob, manifest.temperature)
            for name, each in values:
                sums[name][depths.start : depths.stop] += each.double().sum(0).cpu()
    return dict(sums)


def _quantities(
    logits: Sequence[Tensor], draft_ids: Tensor, top: int
) -> Iterator[tuple[Quantity, Tensor]]:
    """[R, D] of every quantity that needs no log-probability of the target."""
    p, q = (rows.log_softmax(-1) for rows in logits)
    best_p, best_q = (logprobs.topk(top, dim=-1).indices for logprobs in (p, q))
    proposable = draft_ids >= 0
    yield "rows", torch.ones_like(draft_ids)
    # Rounding can make a divergence of zero slightly negative.
    yield "divergence", (p.exp() * (p - q)).sum(-1).clamp(min=0)
    yield "same_first", best_p[..., 0] == best_q[..., 0]
    yield "same_top", (best_p[..., None] == best_q[..., None, :]).any(-1).double().mean(-1)
    yield "overlap", torch.minimum(p, q).exp().sum(-1)
    yield "proposable", proposable
    yield "right_baseline", best_p[..., 0] == draft_ids
    yield "right_candidate", best_q[..., 0] == draft_ids
    yield "surprise_baseline", -_of(p, draft_ids).masked_fill(~proposable, 0)
    yield "surprise_candidate", -_of(q, draft_ids).masked_fill(~proposable, 0)


def _accepted(
    logits: Sequence[Tensor], draft_ids: Tensor, logprob: Tensor, temperature: float
) -> Iterator[tuple[Quantity, Tensor]]:
    for name, rows in zip(ACCEPTED, logits, strict=True):
        drawn = _of((rows / temperature).log_softmax(-1), draft_ids)
        drawn = drawn.masked_fill(draft_ids < 0, -torch.inf)
        yield name, acceptance_probabilities(drawn, logprob)


ACCEPTED: tuple[Quantity, Quantity] = ("accepted_baseline", "accepted_candidate")


def _of(logprobs: Tensor, draft_ids: Tensor) -> Tensor:
    """[R, D] of [R, D, V], with any value for a token that is not in the vocabulary."""
    return logprobs.gather(-1, draft_ids.clamp(min=0)[..., None])[..., 0]


def _logits(draft: LoadedDraft, hidden: Tensor) -> Tensor:
    """Logits in float32 or wider: rounding to BF16 would move them more than codes do.

    Taken before a draft excludes tokens, as DFlash2 does all except its candidates: otherwise the
    divergence of two drafts whose candidates differ by one would be infinite.
    """
    logits = finite(draft.forward.scores(hidden), draft.name, "logits")
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _vocabulary(draft: LoadedDraft) -> Tensor:
    return draft.forward.to_target(torch.arange(draft.forward.num_logits, device=draft.device))


@dataclass(frozen=True, slots=True)
class _Figure:
    """A quantity, or the change from the first to the second, and its limit in `DraftLimits`."""

    what: str
    name: str
    quantities: tuple[Quantity, ...]
    per: Quantity = "rows"
    highest: float = 1.0  # of the limit
    least: float | None = None
    most: float | None = None

    def total(self, sums: Mapping[Quantity, Floats]) -> float:
        first, *second = (float(sums[name].sum()) for name in self.quantities)
        return second[0] - first if second else first

    def limits(self, allowed: DraftLimits) -> Limits:
        option, of = f"--{self.name.replace('_', '-')}", (0.0, self.highest)
        value = getattr(allowed, self.name)
        return limits(option, value, of=of, least=self.least, most=self.most)


_SURPRISE: tuple[Quantity, Quantity] = ("surprise_baseline", "surprise_candidate")
_FIGURES = (
    _Figure("KL(BF16 || quantized)", "max_kl", ("divergence",), highest=math.inf, most=1),
    _Figure("top-1 agreement", "min_agreement", ("same_first",), least=1),
    _Figure("top-{top} agreement", "min_top_agreement", ("same_top",), least=1),
    _Figure("overlap", "min_overlap", ("overlap",), least=1),
    _Figure("right tokens, change", "max_right_drop", ("right_baseline", "right_candidate"),
            least=-1),
    _Figure("log perplexity, change", "max_perplexity_rise", _SURPRISE, "proposable", math.inf,
            most=1),
    _Figure("alpha, change", "max_alpha_drop", ACCEPTED, least=-1),
)  # fmt: skip


def draft_findings(
    prompts: Sequence[PromptAgreement], allowed: DraftLimits, *, top: int, confidence: float
) -> tuple[ParityFinding, ...]:
    """Judge every figure over all rows; conversations are the sampled units."""
    sampled = all(name in prompts[0].sums for name in ACCEPTED)
    return tuple(
        _finding(figure, figure.what.format(top=top), figure.limits(allowed), prompts, confidence)
        for figure in _FIGURES
        if sampled or figure.quantities != ACCEPTED
    )


def check_limits(allowed: DraftLimits) -> None:
    """Refuse, before any work, limits that are out of range."""
    for figure in _FIGURES:
        figure.limits(allowed)


def _finding(
    figure: _Figure,
    what: str,
    allowed: Limits,
    prompts: Sequence[PromptAgreement],
    confidence: float,
) -> ParityFinding:
    details = []
    for named, some, steps in _parts(prompts):
        bounded = _bounded(figure, some, steps, confidence)
        if bounded is not None:
            details.append(named | _plain(bounded) | _sides(figure, some, steps))
    whole = _bounded(figure, prompts, slice(None), confidence)
    if whole is None:
        return ParityFinding(
            check="draft",
            what=what,
            estimate=None,
            threshold=None,
            verdict="INCONCLUSIVE",
            reason="No recorded token is in the drafts' vocabulary.",
        )
    remedy = "record more prompts"
    return judged("draft", what, whole, allowed, remedy=remedy, details=details)


def _parts(
    prompts: Sequence[PromptAgreement],
) -> Iterator[tuple[dict[str, object], Sequence[PromptAgreement], slice]]:
    for step in range(len(prompts[0].sums["rows"])):
        yield {"step": step + 1}, prompts, slice(step, step + 1)
    for name in sorted({prompt.category for prompt in prompts}):
        yield {"category": name}, [p for p in prompts if p.category == name], slice(None)


def _bounded(
    figure: _Figure, prompts: Sequence[PromptAgreement], steps: slice, confidence: float
) -> Bounded | None:
    """Pooled over rows, with conversations as clusters; None where there are no rows."""
    clusters: dict[str, tuple[float, float]] = {}
    for prompt in prompts:
        sums = {name: each[steps].numpy() for name, each in prompt.sums.items()}
        total, count = figure.total(sums), float(sums[figure.per].sum())
        before = clusters.get(prompt.prompt_sha256, (0.0, 0.0))
        clusters[prompt.prompt_sha256] = (before[0] + total, before[1] + count)
    counted = [pair for pair in clusters.values() if pair[1] > 0]
    if not counted:
        return None
    totals, counts = zip(*counted, strict=True)
    return pooled_mean(totals, counts, confidence=confidence)


def _plain(bounded: Bounded) -> dict[str, object]:
    return {
        "estimate": bounded.estimate,
        "lower": bounded.lower if bounded.has_spread else None,
        "upper": bounded.upper if bounded.has_spread else None,
        "prompts": bounded.num_clusters,
    }


def _sides(figure: _Figure, prompts: Sequence[PromptAgreement], steps: slice) -> dict[str, object]:
    if len(figure.quantities) < 2:
        return {}
    count = sum(float(p.sums[figure.per][steps].sum()) for p in prompts)
    means = (
        sum(float(p.sums[side][steps].sum()) for p in prompts) / count for side in figure.quantities
    )
    return dict(zip(("baseline", "candidate"), means, strict=True))
