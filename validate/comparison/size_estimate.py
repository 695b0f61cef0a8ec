"""What `estimate` says of a draft at every size of its head: bytes of drafting, time, speed-up.

Of figures of `estimate` and of the measured change of the acceptance length r - 1:

    speed-up = r * (drafting of all rows + verify) / (drafting + verify)

The head becomes cheaper for every draft step, whatever the text; what it costs in accepted tokens
is paid in verify steps of the target. So without the time of a verify step no speed-up is known,
but the longest verify step at which a size still pays is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from typing_extensions import override

from ...calibration.vocabulary_rows import Choosing, ChosenRows
from ...quantize.drafts import Draft, read_config
from ...quantize.drafts.family import Row, TensorSpec
from ...quantize.estimate.draft_step import draft_round, plain_weights, usual_context
from ...quantize.estimate.work import Machine, Round
from ...quantize.files.safetensors_header import DTYPE_BYTES, TensorInfo
from ...quantize.vocabulary.cut_vocabulary import VocabularyReport
from ...recipes.brief import Brief
from ...recipes.errors import CheckpointError, EstimateError
from .size_curve import ChoiceCurve, SizeChange, SizeCurve


def with_vocabulary(draft: Draft, size: int) -> Draft:
    """The draft as it would be with a head of `size` kept rows: headers and geometry alone.

    A head that was the target's is the draft's own, in its dtype; the maps d2t and t2d are there.
    """
    held = draft.geometry.draft_vocab_size
    if not 0 < size < held:
        what = f"expected at least 1 and fewer than the {held:,} rows of the head, got {size:,}"
        raise EstimateError("--sizes", what, fix="give the number of rows to keep, such as 32000")
    config = {**draft.checkpoint.config, "draft_vocab_size": size}
    try:
        _, geometry = read_config(replace(draft.checkpoint, config=config))
    except CheckpointError as exc:
        raise EstimateError("--sizes", exc.what, fix="give a draft whose head can be cut") from exc
    specs = draft.family.tensor_specs(geometry)
    if geometry.draft_vocab_size != size or "d2t" not in specs:
        what = f"drafts of {draft.family.name} have no map of a cut vocabulary"
        raise EstimateError("--sizes", what, fix="give a draft whose head can be cut")
    rows = {row.canonical: row for row in draft.rows}
    dtypes = {"lm_head.weight": _dtype(draft), "d2t": "I64", "t2d": "BOOL"}
    held_rows = [_resized(row, specs[row.canonical]) for row in draft.rows]
    made = [_made(name, dtype, specs[name]) for name, dtype in dtypes.items() if name not in rows]
    ordered = sorted([*held_rows, *made], key=lambda row: row.tensor.name)
    tensors = {row.tensor.name: row.tensor for row in ordered}
    return replace(
        draft,
        checkpoint=replace(draft.checkpoint, config=config, tensors=tensors),
        geometry=geometry,
        rows=tuple(ordered),
    )


def _resized(row: Row, spec: TensorSpec) -> Row:
    shape = tuple(dim.size for dim in spec.shape)
    stop = row.tensor.start + prod(shape) * DTYPE_BYTES[row.tensor.dtype]
    file = "" if row.role == "vocabulary_map" else row.tensor.file  # other numbers than it holds
    return replace(row, tensor=replace(row.tensor, file=file, shape=shape, stop=stop))


def _made(name: str, dtype: str, spec: TensorSpec) -> Row:
    shape = tuple(dim.size for dim in spec.shape)
    nbytes = prod(shape) * DTYPE_BYTES[dtype]
    tensor = TensorInfo(name=name, dtype=dtype, shape=shape, file="", start=0, stop=nbytes)
    return Row(tensor=tensor, canonical=name, role=spec.role)


def _dtype(draft: Draft) -> str:
    norms = [row for row in draft.rows if row.role == "norm"]
    return (*norms, *draft.rows)[0].tensor.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of a verify step; by concurrency, or under None one for all of them."""

    seconds: Mapping[int | None, float]

    def verify_seconds(self, concurrency: int) -> float | None:
        """As measured at this concurrency; None where it was not."""
        return self.seconds.get(concurrency, self.seconds.get(None))


def parse_step_times(text: str, concurrencies: Sequence[int]) -> StepTimes:
    """Milliseconds of a verify step: `14.2` for every concurrency, or `1=9.5,8=14.2`."""
    pairs = [part.rpartition("=") for part in text.split(",")]
    try:
        times = {int(c) if given else None: float(ms) / 1e3 for c, given, ms in pairs}
    except ValueError:
        times = {}
    alone = None in times and len(pairs) > 1
    wrong = any(not 0 < seconds < math.inf for seconds in times.values())
    if not times or alone or wrong or len(times) < len(pairs):
        raise EstimateError(
            "--target-step-ms",
            f"expected milliseconds, or CONCURRENCY=MILLISECONDS with commas between, got {text!r}",
            fix="for example 14.2, or 1=9.5,8=14.2,64=38",
        )
    stray = [c for c in times if c is not None and c not in concurrencies]
    if stray:
        asked = ",".join(map(str, concurrencies))
        raise EstimateError(
            "--target-step-ms",
            f"a time at concurrency {stray[0]}, but --concurrency is {asked}",
            fix="name the concurrencies that were measured: --concurrency "
            + ",".join(str(c) for c in times),
        )
    return StepTimes(seconds=times)


def checked_concurrencies(asked: Sequence[int]) -> tuple[int, ...]:
    """The numbers in ascending order, each once; EstimateError: one is below 1."""
    if min(asked) < 1:
        raise EstimateError(
            "--concurrency", f"expected at least 1, got {min(asked)}", fix="such as 1,8,64"
        )
    return tuple(sorted(set(asked)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSpeed:
    """One size on one machine at one concurrency; times in seconds, None where they are not known.

    Attributes:
        pays_below: verify steps shorter than that are sped up; infinity where all are, None where
            none is; None too for all rows.
        speed_up: relative to all rows, 0 = as fast. lower, upper: at the bounds of acceptance.
    """

    size: int
    drafting: float
    pays_below: float | None
    verify: float | None
    speed_up: float | None
    lower: float | None
    upper: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpeeds:
    """All sizes on one machine at one concurrency, all rows last."""

    gpu: str
    concurrency: int
    speeds: tuple[SizeSpeed, ...]

    @property
    def recommended(self) -> SizeSpeed | None:
        """The fastest by what was measured; None where no verify step is known."""
        return self._fastest("speed_up")

    @property
    def range(self) -> tuple[int, ...]:
        """The sizes that are the fastest if every size is at its lower bound, or at its upper."""
        ends = (self._fastest("lower"), self._fastest("upper"))
        return tuple(sorted({end.size for end in ends if end is not None}))

    def _fastest(self, figure: str) -> SizeSpeed | None:
        known = [one for one in self.speeds if getattr(one, figure) is not None]
        # Of equal ones the larger head, which loses less on text like none of the prompts.
        return max(known, key=lambda one: (getattr(one, figure), one.size), default=None)


def size_speeds(
    curve: SizeCurve,
    chosen: ChoiceCurve,
    rounds: Mapping[int, Round],
    machines: Sequence[Machine],
    target: StepTimes | None,
    concurrencies: Sequence[int],
) -> tuple[MachineSpeeds, ...]:
    """Every size on every machine at every concurrency."""
    found = []
    for machine in machines:
        for concurrency in concurrencies:
            verify = None if target is None else target.verify_seconds(concurrency)
            whole = machine.round_seconds(rounds[curve.num_rows], concurrency)
            speeds = [
                _speed(one, machine.round_seconds(rounds[one.size], concurrency), whole, verify)
                for one in chosen.whole
            ]
            known = 0.0 if verify is not None else None
            speeds.append(
                SizeSpeed(
                    size=curve.num_rows,
                    drafting=whole,
                    pays_below=None,
                    verify=verify,
                    speed_up=known,
                    lower=known,
                    upper=known,
                )
            )
            found.append(
                MachineSpeeds(gpu=machine.gpu.name, concurrency=concurrency, speeds=tuple(speeds))
            )
    return tuple(found)


def _speed(one: SizeChange, drafting: float, whole: float, verify: float | None) -> SizeSpeed:
    def speed_up(change: float) -> float | None:
        if verify is None:
            return None
        return (1 + change) * (whole + verify) / (drafting + verify) - 1

    return SizeSpeed(
        size=one.size,
        drafting=drafting,
        pays_below=_pays_below(one.relative_change, drafting, whole),
        verify=verify,
        speed_up=speed_up(one.relative_change),
        lower=speed_up(one.lower),
        upper=speed_up(one.upper),
    )


def _pays_below(change: float, drafting: float, whole: float) -> float | None:
    """Where r (whole + v) = drafting + v, that is v = (r whole - drafting) / (1 - r)."""
    saved = (1 + change) * whole - drafting
    if saved <= 0:
        return None
    return math.inf if change >= 0 else saved / -change


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeEstimate:
    """Bytes that drafting reads at concurrency 1, of them the head's, and speed, by number of rows.

    `off_domain` is with rows chosen without a prompt's own category; empty where there are none.
    """

    drafting_bytes: Mapping[int, int]
    head_bytes: Mapping[int, int]
    context: int
    speeds: tuple[MachineSpeeds, ...]
    off_domain: tuple[MachineSpeeds, ...]


def size_estimate(
    draft: Draft,
    curve: SizeCurve,
    machines: Sequence[Machine],
    target: StepTimes | None,
    concurrencies: Sequence[int],
) -> SizeEstimate:
    """Estimate every size of a curve of an unquantized draft, by its headers."""
    context = usual_context(draft.checkpoint.config)
    k = curve.num_draft_tokens
    drafts = {size: with_vocabulary(draft, size) for size in curve.sizes} | {curve.num_rows: draft}
    rounds = {
        size: draft_round(one, plain_weights(one), num_draft_tokens=k, context=context, tp=1)
        for size, one in drafts.items()
    }
    return SizeEstimate(
        drafting_bytes={size: one.nbytes(1) for size, one in rounds.items()},
        head_bytes={size: one.nbytes(1, "head") for size, one in rounds.items()},
        context=context,
        speeds=size_speeds(curve, curve.chosen, rounds, machines, target, concurrencies),
        off_domain=()
        if curve.off_domain is None
        else size_speeds(curve, curve.off_domain, rounds, machines, target, concurrencies),
    )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class VocabReport(Brief):
    """Rows of a head, chosen by what a target says.

    Attributes:
        choosing: the draft, the traces and the text that chooses the rows.
        rows: the rows that were kept, and what they cover; None for the curve.
        cut: the folder that was written; None for the curve.
        curve: the acceptance length by the number of rows; None where a folder was written.
        estimate: bytes and speed by the number of rows; None where a folder was written, and for a
            draft that cannot be estimated.
        warnings: what the command line prints as warnings.
    """

    choosing: Choosing
    rows: ChosenRows | None = None
    cut: VocabularyReport | None = None
    curve: SizeCurve | None = None
    estimate: SizeEstimate | None = None
    warnings: tuple[str, ...] = ()

    @override
    def brief(self) -> Mapping[str, object]:
        found: dict[str, object] = {}
        if self.curve is not None:
            found |= self.curve.brief()
        if self.cut is not None and self.rows is not None:
            found |= {**self.cut.brief(), "held-out coverage": f"{self.rows.held_out:.2%}"}
        return found | {"warnings": len(self.warnings) or None}
