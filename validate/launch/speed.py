"""How fast servers write, and how much faster than each other, from measurements of a matrix.

Ratios of sums, never means of ratios. A speed-up is one of output tokens per second *in flight*:
the sum of all output tokens over the sum of all latencies, times the requests in flight. It leaves
out the end of a run, where fewer and fewer requests are in flight; how long that takes is a matter
of which prompt happens to be the last, which neither prompts nor repeats show: with 80 prompts, 40
in flight, intervals of whole runs cover 75 to 92 % instead of 95 % (simulated, see `crossed`).
Tokens over the wall time of whole runs stand beside it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from ...recipes.brief import Brief, counted
from ...recipes.errors import short
from ..counting.jackknife import Floats
from ..errors import MeasureError
from ..measure.measurement import Measurement, RequestRecord, differences
from .crossed_intervals import Estimate, Factor, estimate

PROMPTS_PER_REQUEST_IN_FLIGHT = 4
"""Below that much of a run is its end."""
FEWEST_REPEATS = 3
"""97.5 % quantiles of t: 12.7 with two repeats, 4.3 with three, 3.2 with four."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A measurement, and where it stands in the matrix.

    Attributes:
        variant: name. drafts: whether its server was given a draft.
        concurrency: requests in flight. repeat: from 1.
    """

    variant: str
    drafts: bool
    concurrency: int
    repeat: int
    measurement: Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Seconds over requests: the pooled mean, and where half and 99 % of the requests are below."""

    mean: float
    median: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFigures:
    """What a variant does at a concurrency.

    Attributes:
        num_requests: in all repeats. num_tokens: that they wrote. num_retried: asked more than
            once; their latency is that of the attempt that was answered.
        tokens_per_second: in flight, see the module. whole_run_tokens_per_second: tokens over wall
            time, of all repeats together.
        time_per_output_token: seconds behind the first token, all tokens pooled; None where answers
            come whole. its spread, and time_to_first_token: over requests.
        acceptance_length: pooled, bonus token included; None without a draft.
        speed_up: of tokens_per_second against the variant without a draft; None for that one and
            where there is none.
        against_baseline: the same against the first variant with a draft; None for it.
    """

    variant: str
    concurrency: int
    repeats: int
    num_requests: int
    num_tokens: int
    num_retried: int
    tokens_per_second: Estimate
    whole_run_tokens_per_second: float
    time_per_output_token: Estimate | None
    time_per_output_token_spread: Spread | None
    time_to_first_token: Spread | None
    acceptance_length: Estimate | None
    speed_up: Estimate | None
    against_baseline: Estimate | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SpeedReport(Brief):
    """How fast each variant of a matrix of servers is.

    Attributes:
        engine: the engine with its version.
        model: the target, as the server calls it.
        undrafted: the variant without a draft; None where there is none.
        baseline: the first variant with a draft; None where there is none.
        num_prompts: number of distinct prompts.
        figures: the figures, by concurrency, then in the order of the variants.
        warnings: what a reader has to know, one sentence each.
    """

    engine: str
    model: str
    undrafted: str | None
    baseline: str | None
    num_prompts: int
    figures: tuple[SpeedFigures, ...]
    warnings: tuple[str, ...]

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of the variants, in order."""
        return tuple(dict.fromkeys(one.variant for one in self.figures))

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """How many sequences were served at once, in order."""
        return tuple(dict.fromkeys(one.concurrency for one in self.figures))

    def of(self, variant: str, concurrency: int) -> SpeedFigures:
        """The figures of one variant at one concurrency."""
        place = (variant, concurrency)
        return next(one for one in self.figures if (one.variant, one.concurrency) == place)

    @override
    def brief(self) -> Mapping[str, object]:
        return {
            "engine": self.engine,
            "model": self.model,
            "variants": ", ".join(self.variants),
            "concurrency": ", ".join(map(str, self.concurrencies)),
            "prompts": self.num_prompts,
            "warnings": len(self.warnings) or None,
        }


def speed_report(runs: Sequence[Run]) -> SpeedReport:
    """Figures of a whole matrix.

    Args:
        runs: of each variant at each concurrency the same repeats, in the order of the variants.

    Raises:
        MeasureError: the measurements do not belong together, or a variant's server drafted
            although it has no draft, or the other way round.
    """
    _check(runs)
    setup = runs[0].measurement.setup
    undrafted = next((run.variant for run in runs if not run.drafts), None)
    baseline = next((run.variant for run in runs if run.drafts), None)
    variants = dict.fromkeys(run.variant for run in runs)
    figures: list[SpeedFigures] = []
    for concurrency in dict.fromkeys(run.concurrency for run in runs):
        cells = {name: _cell(runs, name, concurrency) for name in variants}
        beside = cells.get(undrafted or ""), cells.get(baseline or "")
        figures += [_figures(cell, *beside) for cell in cells.values()]
    return SpeedReport(
        engine=f"{setup.server.engine} {setup.server.version}",
        model=setup.server.model,
        undrafted=undrafted,
        baseline=baseline,
        num_prompts=len({record.prompt_sha256 for record in runs[0].measurement.records}),
        figures=tuple(figures),
        warnings=tuple(_warnings(runs, figures)),
    )


def _check(runs: Sequence[Run]) -> None:
    first = runs[0].measurement
    for run in runs:
        one = run.measurement
        if found := differences(first.setup, one.setup):
            raise MeasureError(
                one.name,
                f"was not measured as {first.name} was:",
                details=[f"  {difference}" for difference in found],
                fix="measure the matrix anew, in another --out",
            )
        if [r.prompt_sha256 for r in one.records] != [r.prompt_sha256 for r in first.records]:
            raise MeasureError(one.name, f"has other prompts than {first.name}",
                               fix="measure the matrix anew, in another --out")  # fmt: skip
        if (one.setup.speculation is not None) != run.drafts:
            does = "drafts nothing" if run.drafts else "drafts"
            raise MeasureError(
                one.name,
                f"the server of variant {run.variant} {does}, and the matrix says otherwise",
                fix="correct the variant's arguments, and measure in another --out",
            )
        if (asked := one.setup.asked.concurrency) != run.concurrency:
            what = f"has {asked} request(s) in flight, and not {run.concurrency}"
            raise MeasureError(one.name, what, fix="measure the matrix anew, in another --out")
        for record in one.records:
            if record.latency <= 0:
                what = f"prompt {short(record.id)}: expected a latency above 0 seconds"
                raise MeasureError(one.name, what, fix="measure it anew")


class _Cell(NamedTuple):
    """The runs of a variant at a concurrency: the records of each repeat."""

    variant: str
    concurrency: int
    repeats: Sequence[Sequence[RequestRecord]]

    @property
    def records(self) -> list[RequestRecord]:
        return [record for records in self.repeats for record in records]

    def sums(self, value: Callable[[RequestRecord], float]) -> Floats:
        """[repeats, distinct prompts]: copies of a prompt are one, as to the gate."""
        column = {sha: i for i, sha in enumerate(dict.fromkeys(map(_sha256, self.repeats[0])))}
        sums = np.zeros((len(self.repeats), len(column)))
        for repeat, records in enumerate(self.repeats):
            for record in records:
                sums[repeat, column[record.prompt_sha256]] += value(record)
        return sums

    def speed(self) -> list[Factor]:
        """Tokens per second and request in flight."""
        tokens, seconds = self.sums(_num_tokens), self.sums(_latency)
        return [Factor(tokens, 1), Factor(seconds, -1)]

    def speed_against(self, other: "_Cell | None") -> Estimate | None:
        """Ratio of two speeds on the same prompts; None against itself or nothing."""
        if other is None or other is self:
            return None
        below = [Factor(factor.values, -factor.power) for factor in other.speed()]
        return estimate([*self.speed(), *below])

    def whole_runs(self) -> float:
        """Seconds from the first request of each repeat to its last answer, summed."""
        return sum(
            max(r.began + r.latency for r in records) - min(r.began for r in records)
            for records in self.repeats
        )


def _cell(runs: Sequence[Run], variant: str, concurrency: int) -> _Cell:
    found = [r for r in runs if (r.variant, r.concurrency) == (variant, concurrency)]
    ordered = sorted(found, key=lambda run: run.repeat)
    return _Cell(variant, concurrency, [run.measurement.records for run in ordered])


def _sha256(record: RequestRecord) -> str:
    return record.prompt_sha256


def _num_tokens(record: RequestRecord) -> float:
    return len(record.token_ids)


def _latency(record: RequestRecord) -> float:
    return record.latency


def _figures(cell: _Cell, undrafted: _Cell | None, baseline: _Cell | None) -> SpeedFigures:
    records = cell.records
    in_flight = min(cell.concurrency, len(cell.repeats[0]))
    first = [r.time_to_first_token for r in records if r.time_to_first_token is not None]
    per_token = [t for r in records if (t := r.time_per_output_token) is not None]
    pooled = _time_per_output_token(cell) if per_token and len(first) == len(records) else None
    return SpeedFigures(
        variant=cell.variant,
        concurrency=cell.concurrency,
        repeats=len(cell.repeats),
        num_requests=len(records),
        num_tokens=sum(len(r.token_ids) for r in records),
        num_retried=sum(r.num_attempts > 1 for r in records),
        tokens_per_second=estimate(cell.speed()).times(in_flight),
        whole_run_tokens_per_second=sum(map(_num_tokens, records)) / cell.whole_runs(),
        time_per_output_token=pooled,
        time_per_output_token_spread=_spread(per_token, pooled.value) if pooled else None,
        time_to_first_token=_spread(first, float(np.mean(first))) if first else None,
        acceptance_length=_acceptance_length(cell),
        speed_up=cell.speed_against(undrafted),
        against_baseline=None if cell is undrafted else cell.speed_against(baseline),
    )


def _time_per_output_token(cell: _Cell) -> Estimate:
    """Seconds behind the first tokens over the tokens that came then; all answers are streamed."""
    seconds = cell.sums(lambda r: r.latency - (r.time_to_first_token or 0))
    tokens = cell.sums(lambda r: len(r.token_ids) - 1)
    return estimate([Factor(seconds, 1), Factor(tokens, -1)])


def _acceptance_length(cell: _Cell) -> Estimate | None:
    emitted = cell.sums(lambda r: r.counts.num_emitted_tokens if r.counts else 0)
    rounds = cell.sums(lambda r: r.counts.num_steps if r.counts else 0)
    return estimate([Factor(emitted, 1), Factor(rounds, -1)]) if rounds.any() else None


def _spread(seconds: Sequence[float], mean: float) -> Spread:
    median, p99 = (float(q) for q in np.quantile(seconds, (0.5, 0.99)))
    return Spread(mean=mean, median=median, p99=p99)


def _warnings(runs: Sequence[Run], figures: Sequence[SpeedFigures]) -> Iterable[str]:
    if figures[0].repeats < 2:
        yield (
            "one repeat does not show how much a server's speed varies, so there are no intervals"
            " (repeats: 3)"
        )
    elif figures[0].repeats < FEWEST_REPEATS:
        yield "with two repeats, intervals are three times as wide as with three"
    retried = sum(one.num_retried for one in figures)
    if retried:
        yield f"{retried} request(s) were asked more than once: the servers were overloaded"
    num_prompts = len(runs[0].measurement.records)
    short_of = [
        str(c)
        for c in dict.fromkeys(run.concurrency for run in runs)
        if c > 1 and num_prompts < PROMPTS_PER_REQUEST_IN_FLIGHT * c
    ]
    if short_of:
        yield (
            f"{counted(num_prompts, 'prompt')} {'is' if num_prompts == 1 else 'are'} few at"
            f" concurrency {', '.join(short_of)}: during much of a run fewer requests are in flight"
        )
    speculations = {run.variant: s for run in runs if (s := run.measurement.setup.speculation)}
    for variant, speculation in speculations.items():
        if speculation.lossy:
            yield f"{variant} has a lossy acceptance rule: {', '.join(speculation.lossy)}"
    if len({speculation.num_draft_tokens for speculation in speculations.values()}) > 1:
        drafted = ", ".join(f"{name} {s.num_draft_tokens}" for name, s in speculations.items())
        yield f"the variants draft different numbers of tokens: {drafted}"
