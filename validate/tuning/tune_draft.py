"""`tune_draft`: costs unit by unit, the mixtures that they lead to, one of them chosen."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from typing_extensions import override

from ...calibration.passes.draft_inputs import check_trace_fits
from ...calibration.traces.trace_folder import TraceFolder
from ...quantize.drafts import Draft
from ...quantize.stored.loading import LoadedDraft
from ...recipes import Recipe, to_mapping
from ...recipes.algorithm import ALGORITHMS, Algorithm
from ...recipes.brief import Brief, megabytes
from ..counting.draft_replay import DraftReplay
from ..counting.replay_cache import Elsewhere, ReplayCache
from ..counting.trace_replay import replay_drafts
from ..errors import TuneError
from ..judging.anomalies import min_baseline_length
from ..judging.policy import POLICIES
from .candidates import Candidates, bytes_of, kept_bytes_of
from .draft_mixture import KEPT, Mixture, Option, Unit
from .measured_mixtures import (
    Computing,
    Measured,
    Numbers,
    Point,
    Refused,
    compute_here,
    overlaps_of,
    tasks_of,
)
from .search import Costs, UnitCost, greedy_path, narrowed_mixtures, uniform_mixtures

MIN_PROMPTS = 8
"""To judge mixtures by; the gate wants 30."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which mixture is chosen: one of the two limits.

    Attributes:
        budget: the draft's tensors take so many bytes at most; then the one with most overlap.
        max_drop: a larger relative loss of acceptance length is ruled out at 95 %; then the one
            with fewest bytes.
    """

    budget: int | None = None
    max_drop: float | None = None

    def choice(self, points: Sequence[Point]) -> Point | None:
        """The point to take, None where none is as wanted."""
        if self.budget is not None:
            fitting = [point for point in points if point.nbytes <= self.budget]
            return max(fitting, key=lambda point: (point.overlap, -point.nbytes), default=None)
        allowed = [point for point in points if point.largest_drop <= (self.max_drop or 0.0)]
        return min(allowed, key=lambda point: (point.nbytes, -point.overlap), default=None)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TuneReport(Brief):
    """Which formats were tried for a draft's linears, and which mixture was chosen.

    Attributes:
        unquantized_bytes: bytes of the unquantized draft's tensors.
        unquantized_length: its acceptance length.
        costs: the cost of each format, for each group of linears.
        refused: formats that are not possible for a group, and the reasons.
        points: the mixtures that were measured, fewest bytes first.
        chosen: the chosen mixture; None where none meets the limit.
        num_prompts: number of prompts that judged the mixtures.
        num_calibration_prompts: number of other prompts that calibrated them; 0 if none did.
        doubt: why the traces may belong to another target; None without such a doubt.
        wanted: the limit that the mixture had to meet.
        algorithm: how scales and quantized values were found.
        recipe: the recipe of the chosen mixture; None where none was written.
    """

    unquantized_bytes: int
    unquantized_length: float
    costs: Costs
    refused: tuple[Refused, ...]
    points: tuple[Point, ...]
    chosen: Point | None
    num_prompts: int
    num_calibration_prompts: int
    doubt: str | None
    wanted: Wanted
    algorithm: str
    recipe: Recipe | None = None

    def to_mapping(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "unquantized_bytes": self.unquantized_bytes,
            "unquantized_acceptance_length": self.unquantized_length,
            "num_prompts": self.num_prompts,
            "num_calibration_prompts": self.num_calibration_prompts,
            "doubt": self.doubt,
            "costs": {
                str(unit): {str(option): dataclasses.asdict(cost) for option, cost in each.items()}
                for unit, each in self.costs.items()
            },
            "refused": [dataclasses.asdict(one) for one in self.refused],
            "points": [_mapping(point, chosen=point is self.chosen) for point in self.points],
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        """The doubt, where there is one."""
        return () if self.doubt is None else (self.doubt,)

    @override
    def brief(self) -> Mapping[str, object]:
        chosen = self.chosen
        return {
            "recipe": self.recipe.name if self.recipe else "no mixture is as wanted",
            "summary": self.recipe.summary if self.recipe else None,
            "acceptance length, BF16": f"{self.unquantized_length:.4f}",
            "chosen": f"{megabytes(chosen.nbytes)}" if chosen else None,
            "instead of": megabytes(self.unquantized_bytes),
            "prompts": self.num_prompts,
        }


def tune_draft(
    candidates: Candidates,
    units: Sequence[Unit],
    options: Sequence[Option],
    traces: TraceFolder,
    wanted: Wanted,
    *,
    cache: ReplayCache | None = None,
    elsewhere: Elsewhere | None = None,
    computing: Computing = compute_here,
    on_progress: Callable[[str], None] = lambda _what: None,
) -> TuneReport:
    """Find out how narrow each unit of a draft may be.

    Args:
        candidates: makes the drafts.
        units: that may be narrow; see `units_of`.
        options: what they may become; see `options_of`.
        traces: to judge by; others than those of `candidates` and than the gate's.
        wanted: which mixture to choose.
        cache: of the unquantized draft's replay; see `replay_drafts`.
        elsewhere: likewise.
        computing: measures mixtures; it is asked for many at once, which wait for no other.
        on_progress: called with what is measured next.

    Raises:
        TuneError: too few prompts, or no unit can be quantized at all.
        TraceError, CalibrationError, ReplayError: the traces do not fit the draft.
        DraftQuantError: a candidate cannot be made.
    """
    reference, k = candidates.reference, candidates.num_draft_tokens
    check_trace_fits(reference, traces)
    if len(traces) < MIN_PROMPTS:
        raise TuneError(
            traces.folder,
            f"expected at least {MIN_PROMPTS} prompts to judge mixtures by, got {len(traces)}",
            fix="record more prompts, 96 or more",
        )
    on_progress("the unquantized draft")
    (baseline,) = replay_drafts(
        [reference], traces, num_draft_tokens=k, cache=cache, elsewhere=elsewhere
    )
    costs, refused = _costs(candidates, units, options, traces, computing, on_progress)
    measured = Measured(candidates, baseline, traces, computing, on_progress)
    uniform = [mixture for mixture in uniform_mixtures(costs) if measured.allowed(mixture)]
    measured.add([*uniform, *greedy_path(costs, measured.allowed)])
    if not measured.points:
        raise TuneError(
            candidates.draft.checkpoint.folder,
            f"no mixture of these formats loads ({candidates.serving})",
            details=list(dict.fromkeys(one.why for one in (*refused, *measured.refused))),
            fix="give other recipes (--recipe) or another engine or GPU; where config.json itself"
            " is refused, correct it (draftquant check --fix), or pass --fix-config",
        )
    points, chosen = _narrowed(measured, costs, wanted)
    return TuneReport(
        unquantized_bytes=sum(row.tensor.nbytes for row in candidates.draft.rows),
        unquantized_length=baseline.counts.mean_acceptance_length,
        costs=costs,
        refused=(*refused, *measured.refused),
        points=tuple(points),
        chosen=chosen,
        num_prompts=len(traces),
        num_calibration_prompts=len(candidates.calibration or ()),
        doubt=_doubt(baseline),
        wanted=wanted,
        algorithm=_name_of(candidates.base.algorithm),
    )


def _narrowed(measured: Measured, costs: Costs, wanted: Wanted) -> tuple[list[Point], Point | None]:
    """Narrow each unit of the chosen mixture by itself, until nothing smaller is as wanted.

    The greedy path only widens: what it widened early may be worth nothing at its end.
    """
    while True:
        points = measured.points
        chosen = wanted.choice(points)
        if chosen is None or wanted.budget is not None:
            return points, chosen
        measured.add(narrowed_mixtures(costs, chosen.mixture, measured.allowed))
        if len(measured.points) == len(points):
            return points, chosen


def recipe_document(recipe: Recipe, draft: Draft, report: TuneReport) -> str:
    """The recipe file, with what it was chosen by."""
    point = report.chosen
    if point is None:
        raise ValueError("nothing was chosen")
    said = (
        f"Found by 'draftquant tune' for {draft.checkpoint.folder.name} ({draft.family.name}):",
        f"{point.said_change} by {report.num_prompts} prompts, {point.nbytes / 1e6:,.2f} MB instead"
        f" of {report.unquantized_bytes / 1e6:,.2f} MB.",
        "Other prompts have to judge it: draftquant gate refuses those of 'chosen_on'.",
    )
    body = yaml.safe_dump(to_mapping(recipe), sort_keys=False, width=100)
    return "".join(f"# {line}\n" for line in said) + body


def _name_of(algorithm: Algorithm) -> str:
    by_name = ALGORITHMS.items()
    found = (name for name, own in by_name if own == (algorithm.scale, algorithm.rounding))
    return next(found, str(algorithm))


def _doubt(baseline: DraftReplay) -> str | None:
    length = baseline.counts.mean_acceptance_length
    least = min_baseline_length(baseline, POLICIES["release"])
    if length >= least:
        return None
    return (
        f"the unquantized draft has an acceptance length of {length:.2f}, a working one at least"
        f" {least:.2f}: check that the traces are of its own target"
    )


def _costs(
    candidates: Candidates,
    units: Sequence[Unit],
    options: Sequence[Option],
    traces: TraceFolder,
    computing: Computing,
    on_progress: Callable[[str], None],
) -> tuple[Costs, list[Refused]]:
    """Every unit in every option, all other units kept."""
    kept = next(option for option in options if option.name == KEPT)
    alone: dict[tuple[Unit, Option], Mixture] = {}
    refused = []
    for unit in units:
        for option in options:
            mixture: Mixture = {each: option if each is unit else kept for each in units}
            why = None if option is kept else candidates.problem(mixture)
            if why is None:
                alone[unit, option] = mixture
            else:
                refused.append(Refused(what=f"{unit} as {option}", why=why))

    narrow = [each for each in alone if each[1] is not kept]
    named = {f"{unit} as {option}": alone[unit, option] for unit, option in narrow}

    def overlaps(drafts: Sequence[LoadedDraft]) -> list[Numbers]:
        found = overlaps_of(drafts, candidates.reference, traces, candidates.num_draft_tokens)
        return [{"overlap": overlap} for overlap in found]

    numbers = computing(tasks_of("overlap", candidates, named, overlaps, on_progress))
    found = dict(zip(narrow, numbers, strict=True))
    costs: dict[Unit, dict[Option, UnitCost]] = {unit: {} for unit in units}
    for (unit, option), narrowed in alone.items():
        if option is kept:
            cost = UnitCost(nbytes=kept_bytes_of(candidates.draft, unit), divergence=0.0)
        else:
            nbytes = bytes_of(candidates.plan(narrowed), unit)
            cost = UnitCost(nbytes=nbytes, divergence=1 - found[unit, option]["overlap"])
        costs[unit][option] = cost
    return costs, refused


def _mapping(point: Point, *, chosen: bool) -> dict[str, Any]:
    return {
        "formats": {str(unit): str(option) for unit, option in point.mixture.items()},
        "bytes": point.nbytes,
        "overlap": point.overlap,
        "acceptance_length": point.acceptance_length,
        "relative_change": point.change.relative_change,
        "lower": math.expm1(point.change.lower),
        "upper": math.expm1(point.change.upper),
        "best": point.best,
        "chosen": chosen,
    }
