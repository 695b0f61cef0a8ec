"""Whether a quantized draft proposes what BF16 proposes: figures with bounds, and their limits.

These are alarms rather than a release gate: they see ten times smaller changes than acceptance
length does, and not always in the same direction. Both drafts are teacher-forced along the recorded
tokens, so that each step is asked about the same text, whatever the steps before it would have
proposed. Distributions are those at temperature 1; their logits are never held for more than some
rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from ...calibration.passes.draft_inputs import check_trace_fits, first_hidden, work_of
from ...calibration.passes.proposals import MAX_LOGITS, draft_ids_of, num_draft_tokens_fault
from ...calibration.traces.prompt_trace import PromptTrace
from ...calibration.traces.trace_folder import TraceFolder
from ...quantize.drafts.forward import DraftPass, finite, positions, whole_rows
from ...quantize.stored.loading import LoadedDraft
from ...recipes.errors import ParityError
from ..counting.paired_change import Bounded, Floats, pooled_mean
from ..counting.trace_replay import acceptance_probabilities
from .finding import MIN_PROMPTS, DraftLimits, Finding, Limits, judged, limits

Quantity = Literal[
    "rows",
    "divergence",
    "same_first",
    "same_top",
    "overlap",
    "right_baseline",
    "right_candidate",
    "proposable",
    "surprise_baseline",
    "surprise_candidate",
    "accepted_baseline",
    "accepted_candidate",
]
"""What is added up over rows, at each step:

rows                 1
divergence           KL(BF16 || quantized) = sum p log(p / q), nats
same_first           1 where both find the same token most likely
same_top             share of the `top` most likely tokens that both have
overlap              sum min(p, q): how often both draw the same token, coupled as well as can be
right_X              1 where X's most likely token is the recorded one
proposable           1 where the recorded token is in the drafts' vocabulary
surprise_X           -log of X's probability of the recorded token, of proposable ones, nats
accepted_X           min(1, X's probability / the target's) of the recorded token, see
                     `expectation`; of drawn text whose probabilities were recorded
"""

DEFAULT_TOP = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptAgreement:
    """One recorded prompt: [K] float64 sums of each quantity, without `accepted_*` if not known."""

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
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[PromptAgreement, ...]:
    """Run both drafts along every prompt that has K tokens to propose; `top` tokens are one set."""
    check_comparable(baseline, candidate, traces, num_draft_tokens)
    if not 1 <= top <= baseline.forward.num_logits:
        most = baseline.forward.num_logits
        raise ParityError("--top", f"expected 1 to {most:,} (the drafts' vocabulary), got {top}",
                          fix=f"leave it out for the default, {DEFAULT_TOP}")  # fmt: skip
    found = []
    work = [work_of([entry], num_draft_tokens) for entry in traces.manifest.prompts]
    for done, entry in zip(accumulate(work), traces.manifest.prompts, strict=True):
        trace = traces.load(entry)
        rows = whole_rows(trace.num_tokens, num_draft_tokens, first_row=trace.prompt_length - 1)
        if rows:
            compared = _Compared(baseline, candidate, traces, trace, rows, num_draft_tokens)
            found.append(compared.agreement(top))
        on_progress(done, sum(work))
    if not found:
        what = f"no continuation is longer than --num-draft-tokens {num_draft_tokens}"
        raise ParityError(traces.folder, what, fix="record longer continuations")
    return tuple(found)


class _Compared:
    def __init__(
        self,
        baseline: LoadedDraft,
        candidate: LoadedDraft,
        traces: TraceFolder,
        trace: PromptTrace,
        rows: range,
        num_draft_tokens: int,
    ) -> None:
        self._drafts = (baseline, candidate)
        self._traces, self._trace = traces, trace
        self._rows, self._k = rows, num_draft_tokens
        self._token_ids = trace.token_ids.to(baseline.device)
        self._draft_ids = draft_ids_of(baseline.forward, self._token_ids)
        manifest = traces.manifest
        self._temperature = manifest.temperature if manifest.logprobs_as_sampled else None

    def agreement(self, top: int) -> PromptAgreement:
        sums: dict[Quantity, Tensor] = {}
        baseline, candidate = self._drafts
        passes = zip(self._passes(baseline), self._passes(candidate), strict=True)
        for one, other in passes:
            at = slice(one.depths.start, one.depths.stop)
            for (mine, its), tokens, logprob in self._parts(one, other):
                logits = (_logits(baseline, mine), _logits(candidate, its))
                for name, each in self._each(logits, tokens, logprob, top):
                    known = sums.setdefault(name, torch.zeros(self._k, dtype=torch.float64))
                    known[at] += each.double().sum(0).cpu()
        return PromptAgreement(
            category=self._trace.category, prompt_sha256=self._trace.cluster_sha256, sums=sums
        )

    def _passes(self, draft: LoadedDraft) -> Iterator[DraftPass]:
        hidden = first_hidden(draft, self._traces, self._trace)
        return draft.forward.passes(
            hidden[None],
            self._token_ids[None],
            rows=self._rows,
            num_draft_tokens=self._k,
        )

    def _parts(
        self, one: DraftPass, other: DraftPass
    ) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor, Tensor | None]]:
        """Hidden states [R, D, W] of both, and tokens [R, D] with the target's log-probability."""
        device = self._token_ids.device
        at = positions(one.rows, device)[:, None] + 2 + positions(one.depths, device)
        tokens, logprob = self._token_ids[at], None
        if self._temperature is not None and self._trace.token_logprob is not None:
            logprob = self._trace.token_logprob.to(device)[at - self._trace.prompt_length]
        together = max(1, MAX_LOGITS // (self._drafts[0].forward.num_logits * len(one.depths)))
        for start in range(0, len(at), together):
            part = slice(start, start + together)
            hidden = (one.hidden[0, part], other.hidden[0, part])
            yield hidden, tokens[part], None if logprob is None else logprob[part]

    def _each(
        self, logits: tuple[Tensor, Tensor], tokens: Tensor, logprob: Tensor | None, top: int
    ) -> Iterator[tuple[Quantity, Tensor]]:
        """[R, D] of every quantity."""
        p, q = (found.log_softmax(-1) for found in logits)
        best_p, best_q = (found.topk(top, dim=-1).indices for found in (p, q))
        draft_ids = self._draft_ids[tokens]
        proposable = draft_ids >= 0
        yield "rows", torch.ones_like(tokens)
        # Rounding puts a divergence of nothing a little below zero.
        yield "divergence", (p.exp() * (p - q)).sum(-1).clamp(min=0)
        yield "same_first", best_p[..., 0] == best_q[..., 0]
        yield "same_top", (best_p[..., None] == best_q[..., None, :]).any(-1).double().mean(-1)
        yield "overlap", torch.minimum(p, q).exp().sum(-1)
        yield "proposable", proposable
        yield "right_baseline", best_p[..., 0] == draft_ids
        yield "right_candidate", best_q[..., 0] == draft_ids
        yield "surprise_baseline", -_of(p, draft_ids).masked_fill(~proposable, 0)
        yield "surprise_candidate", -_of(q, draft_ids).masked_fill(~proposable, 0)
        if logprob is not None and self._temperature is not None:
            for name, found in zip(ACCEPTED, logits, strict=True):
                drawn = _of((found / self._temperature).log_softmax(-1), draft_ids)
                drawn = drawn.masked_fill(~proposable, -torch.inf)
                yield name, acceptance_probabilities(drawn, logprob)


ACCEPTED: tuple[Quantity, Quantity] = ("accepted_baseline", "accepted_candidate")


def _of(logprobs: Tensor, draft_ids: Tensor) -> Tensor:
    """[R, D] of [R, D, V], anything for a token that is not in the vocabulary."""
    return logprobs.gather(-1, draft_ids.clamp(min=0)[..., None])[..., 0]


def _logits(draft: LoadedDraft, hidden: Tensor) -> Tensor:
    """In float32 at least: rounded to BF16 they would move by more than codes move them.

    Before a draft rules tokens out, as DFlash2 does all but its candidates: else the divergence of
    two drafts whose candidates differ by one would be infinite.
    """
    logits = finite(draft.forward.scores(hidden), draft.name, "logits")
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _vocabulary(draft: LoadedDraft) -> Tensor:
    return draft.forward.to_target(torch.arange(draft.forward.num_logits, device=draft.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    what: str
    allowed: Limits
    quantities: tuple[Quantity, ...]
    per: Quantity

    def total(self, sums: Mapping[Quantity, Floats]) -> float:
        """Of one quantity, or the change from the first to the second."""
        first, *second = (float(sums[name].sum()) for name in self.quantities)
        return second[0] - first if second else first


def draft_findings(
    prompts: Sequence[PromptAgreement],
    allowed: DraftLimits,
    *,
    top: int,
    confidence: float,
    min_prompts: int = MIN_PROMPTS,
) -> tuple[Finding, ...]:
    """Judge every figure over all rows, conversations being the unit of sampling."""
    sampled = all(name in prompts[0].sums for name in ACCEPTED)
    figures = [f for f in _figures(allowed, top) if sampled or f.quantities != ACCEPTED]
    return tuple(_finding(figure, prompts, confidence, min_prompts) for figure in figures)


def check_limits(allowed: DraftLimits) -> None:
    """Refuse, before any work, limits that are out of range."""
    list(_figures(allowed, 1))


def _figures(allowed: DraftLimits, top: int) -> Iterator[_Figure]:
    share = (0.0, 1.0)
    of_share: dict[str, Any] = {"of": share, "least": 1}
    drop: dict[str, Any] = {"of": share, "least": -1}
    rise: dict[str, Any] = {"most": 1}
    right: tuple[Quantity, ...] = ("right_baseline", "right_candidate")
    surprise: tuple[Quantity, ...] = ("surprise_baseline", "surprise_candidate")
    rows: tuple[tuple[str, str, tuple[Quantity, ...], dict[str, Any]], ...] = (
        ("KL(BF16 || quantized)", "max_kl", ("divergence",), rise),
        ("top-1 agreement", "min_agreement", ("same_first",), of_share),
        (f"top-{top} agreement", "min_top_agreement", ("same_top",), of_share),
        ("overlap", "min_overlap", ("overlap",), of_share),
        ("right tokens, change", "max_right_drop", right, drop),
        ("log perplexity, change", "max_perplexity_rise", surprise, rise),
        ("alpha, change", "max_alpha_drop", ACCEPTED, drop),
    )
    for what, name, quantities, signs in rows:
        option = f"--{name.replace('_', '-')}"
        yield _Figure(
            what=what,
            allowed=limits(option, getattr(allowed, name), **signs),
            quantities=quantities,
            per="proposable" if quantities is surprise else "rows",
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
        sums = {name: each[steps].numpy() for name, each in prompt.sums.items()}
        total, count = figure.total(sums), float(sums[figure.per].sum())
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
    if len(figure.quantities) < 2:
        return {}
    count = sum(float(p.sums[figure.per][steps].sum()) for p in prompts)
    means = (
        sum(float(p.sums[side][steps].sum()) for p in prompts) / count for side in figure.quantities
    )
    return dict(zip(("baseline", "candidate"), means, strict=True))
