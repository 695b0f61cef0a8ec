"""`EstimateReport`: a draft as it is and by each recipe, under the settings of one estimate."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from typing_extensions import override

from ...recipes.brief import Brief, counted
from ...recipes.errors import EstimateError
from ..drafts.family import Draft
from ..planning.quantization_plan import Plan
from .draft_step import draft_round, plain_weights, planned_weights
from .work import Machine, Part, Pass, Round, VerifyStep, break_even_loss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """The draft as it is, named by its dtype, or as a recipe of this name stores it."""

    name: str
    stored_bytes: int
    round: Round


def candidates_of(draft: Draft, plans: Sequence[Plan], served: VerifyStep) -> tuple[Candidate, ...]:
    """The draft as it is, and by each plan; no two recipes share a name."""
    norms = [row for row in draft.rows if row.role == "norm"]
    dtype = (*norms, *draft.rows)[0].tensor.dtype
    candidates: dict[str, Candidate] = {}
    for plan in (None, *plans):
        name = plan.recipe.name if plan else dtype
        weights = planned_weights(plan) if plan else plain_weights(draft)
        cache = plan.recipe.kv_cache if plan else None
        if name in candidates:
            what = f"two forms are called {name}"
            raise EstimateError("--recipe", what, fix="rename one of them")
        candidates[name] = Candidate(
            name=name,
            stored_bytes=plan.bytes_after if plan else sum(row.tensor.nbytes for row in draft.rows),
            round=draft_round(draft, weights, served, cache.dtype if cache else None),
        )
    return tuple(candidates.values())


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EstimateReport(Brief):
    """An estimate, with the settings that it was made for.

    Attributes:
        draft: the unquantized draft.
        num_draft_tokens: tokens drafted per verify step (K).
        context: positions in the KV cache of each sequence.
        tp: GPUs that share the draft.
        concurrency: how many sequences are served at once.
        candidates: bytes and operations of the draft as it is, and of each recipe's draft.
        loaded_by: name of a recipe -> GPU -> the engines that load its result there.
        refused: name of a built-in recipe that does not fit this draft -> the reason.
        machines: the GPUs, with the share of their data sheet that kernels reach.
        verify_seconds: time of the target's verify step; None where it is not known.
    """

    draft: Draft
    num_draft_tokens: int
    context: int
    tp: int
    concurrency: int
    candidates: tuple[Candidate, ...]
    loaded_by: Mapping[str, Mapping[str, Sequence[str]]]
    refused: Mapping[str, str]
    machines: tuple[Machine, ...]
    verify_seconds: float | None

    @property
    def parameters(self) -> int:
        """Parameters of all its tensors except vocabulary maps."""
        rows = (row for row in self.draft.rows if row.role != "vocabulary_map")
        return sum(row.tensor.numel for row in rows)

    def break_even(self, candidate: Candidate, machine: Machine) -> float | None:
        """The relative loss of acceptance length at break-even; None without a verify step."""
        verify, pair = self.verify_seconds, (self.candidates[0], candidate)
        ours, theirs = [machine.round_seconds(c.round, self.concurrency) for c in pair]
        return None if verify is None else break_even_loss(ours, theirs, verify)

    @override
    def brief(self) -> Mapping[str, object]:
        recipes = counted(len(self.loaded_by), "recipe")
        return {
            "recipes": f"{recipes} on {counted(len(self.machines), 'GPU')}",
            "K": self.num_draft_tokens,
            "do not fit": len(self.refused) or None,
            "target": "known" if self.verify_seconds else "not known: no break-even acceptance",
        }


def assumptions(report: EstimateReport) -> Iterator[str]:
    """What the figures assume, one sentence each."""
    k, share = report.num_draft_tokens, report.machines[0].efficiency
    verified = f"over the {k + 1} positions of each sequence that were verified"
    if report.draft.geometry.block_size is None:
        passes = f"fc and a first step {verified}, then {counted(k - 1, 'step')} over one position"
    else:
        passes = f"fc, keys and values {verified}, then one pass over a block"
    own_head = any(row.role == "head" for row in report.draft.rows)
    head = "" if own_head else ", with the target's head in BF16"
    yield f"drafting is, for each verify step, {passes}{head}"
    yield (
        "weights are read once per step for all sequences, with scales and zero points, and of the"
        f" KV cache {report.context:,} positions of each sequence"
    )
    yield (
        f"each linear takes the longer of bytes / bandwidth and FLOP / dense peak, at {share:.0%}"
        " of the data sheet (--efficiency); launches, sampling and communication take no time"
    )
    for machine in report.machines:
        gpu = machine.gpu
        peaks = ", ".join(f"{name} {peak / 1e12:,.0f}" for name, peak in gpu.peaks.items())
        yield f"{gpu.name}: {gpu.bandwidth / 1e12:g} TB/s; TFLOPS {peaks} ({gpu.source})"


def to_mapping(report: EstimateReport) -> dict[str, Any]:
    """The estimate as plain data: bytes, seconds, shares."""
    return {
        "draft": str(report.draft.checkpoint.folder),
        "family": report.draft.family.name,
        "num_draft_tokens": report.num_draft_tokens,
        "context": report.context,
        "tp": report.tp,
        "efficiency": report.machines[0].efficiency,
        "parameters": report.parameters,
        "drafts": [_candidate_mapping(report, candidate) for candidate in report.candidates],
        "not_planned": dict(report.refused),
        "assumptions": list(assumptions(report)),
    }


def _candidate_mapping(report: EstimateReport, candidate: Candidate) -> dict[str, Any]:
    at, verify = report.concurrency, report.verify_seconds
    times, losses = [], []
    for machine in report.machines:
        place = {"gpu": machine.gpu.name, "concurrency": at}
        step = machine.pass_seconds(candidate.round.step, at)
        whole = machine.round_seconds(candidate.round, at)
        times.append(place | {"step_seconds": step, "round_seconds": whole})
        if verify is not None:
            loss = report.break_even(candidate, machine)
            losses.append(place | {"verify_seconds": verify, "loss": loss})
    return {
        "name": candidate.name,
        "stored_bytes": candidate.stored_bytes,
        "engines": report.loaded_by.get(candidate.name),
        "step_bytes": _by_part(candidate.round.step),
        "round_bytes": _by_part(candidate.round),
        "times": times,
        "break_even": losses,
    }


def _by_part(read: Pass | Round) -> dict[str, int]:
    sizes = {part: read.nbytes(1, part) for part in get_args(Part)}
    return {part: nbytes for part, nbytes in sizes.items() if nbytes}
