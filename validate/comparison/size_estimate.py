"""What `estimate` says about a draft at every size of its head: bytes, time and speed-up.

From figures of `estimate` and the measured change of the acceptance length r - 1:

    speed-up = r * (drafting of all rows + verify) / (drafting + verify)

Without the time of a verify step no speed-up is known, but the longest verify step at which a size
still pays is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from typing_extensions import override

from ...calibration.vocabulary.cut_vocabulary import VocabularyReport
from ...calibration.vocabulary.vocabulary_rows import Choosing, ChosenRows
from ...quantize.drafts import Draft, read_config
from ...quantize.drafts.family import Row, TensorSpec
from ...quantize.estimate.draft_step import draft_round, plain_weights, usual_context
from ...quantize.estimate.work import Machine, Round, VerifyStep
from ...quantize.files.safetensors_header import DTYPE_BYTES, TensorInfo
from ...recipes.brief import Brief
from ...recipes.decode import AT_LEAST_1
from ...recipes.errors import CheckpointError, EstimateError
from .size_curve import ChoiceCurve, SizeCurve


def with_vocabulary(draft: Draft, size: int) -> Draft:
    """The draft with a head of `size` kept rows: only headers and geometry.

    A head from the target becomes the draft's own, in its dtype; the maps d2t and t2d exist.
    """
    held = draft.geometry.draft_vocab_size
    if not 0 < size < held:
        raise EstimateError(
            "--sizes",
            f"expected at least 1 and fewer than the {held:,} rows of the head, got {size:,}",
            fix="give the number of rows to keep, such as 32000",
        )
    config = {**draft.checkpoint.config, "draft_vocab_size": size}
    try:
        _, geometry = read_config(replace(draft.checkpoint, config=config))
    except CheckpointError as exc:
        raise EstimateError("--sizes", exc.what, fix="give a draft whose head can be cut") from exc
    specs = draft.family.tensor_specs(geometry)
    if geometry.draft_vocab_size != size or "d2t" not in specs:
        raise EstimateError(
            "--sizes",
            f"drafts of {draft.family.name} have no map of a cut vocabulary",
            fix="give a draft whose head can be cut",
        )
    rows = {row.canonical: row for row in draft.rows}
    norms = [row for row in draft.rows if row.role == "norm"]
    dtypes = {"lm_head.weight": (*norms, *draft.rows)[0].tensor.dtype, "d2t": "I64", "t2d": "BOOL"}
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
    tensor, shape = row.tensor, tuple(dim.size for dim in spec.shape)
    stop = tensor.start + prod(shape) * DTYPE_BYTES[tensor.dtype]
    file = "" if row.role == "vocabulary_map" else tensor.file  # the file holds other numbers
    return replace(row, tensor=replace(tensor, file=file, shape=shape, stop=stop))


def _made(name: str, dtype: str, spec: TensorSpec) -> Row:
    tensor = TensorInfo(name=name, dtype=dtype, shape=(), file="", start=0, stop=0)
    return _resized(Row(tensor=tensor, canonical=name, role=spec.role), spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSpeeds:
    """What speeds are estimated for; seconds of a verify step by concurrency, None = any."""

    machines: Sequence[Machine]
    concurrencies: Sequence[int]
    step_seconds: Mapping[int | None, float]

    def verify_seconds(self, concurrency: int) -> float | None:
        """The time measured at this concurrency; None where there is none."""
        return self.step_seconds.get(concurrency, self.step_seconds.get(None))


def parse_step_times(text: str, concurrencies: Sequence[int]) -> Mapping[int | None, float]:
    """Seconds of a verify step, from ms: `14.2` for every concurrency, or `1=9.5,8=14`."""
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
        asked, measured = (",".join(map(str, some)) for some in (concurrencies, times))
        what = f"a time at concurrency {stray[0]}, but --concurrency is {asked}"
        fix = f"name the concurrencies that were measured: --concurrency {measured}"
        raise EstimateError("--target-step-ms", what, fix=fix)
    return times


def checked_concurrencies(asked: Sequence[int]) -> tuple[int, ...]:
    """The numbers in ascending order, each once; EstimateError: one is below 1."""
    AT_LEAST_1.check(EstimateError, "--concurrency", min(asked), fix="such as 1,8,64")
    return tuple(sorted(set(asked)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSpeed:
    """One size on one machine at one concurrency; times in seconds, None where they are not known.

    Verify steps shorter than `pays_below` gain speed: infinity = all, None = none, and for all
    rows. `speed_up` is relative to all rows, 0 = as fast.
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
        """The sizes that are fastest if every size is at its lower bound, or at its upper bound."""
        ends = (self._fastest("lower"), self._fastest("upper"))
        return tuple(sorted({end.size for end in ends if end is not None}))

    def _fastest(self, figure: str) -> SizeSpeed | None:
        known = [speed for speed in self.speeds if getattr(speed, figure) is not None]
        # Among equals the larger head, which loses less on text unlike all of the prompts.
        return max(known, key=lambda speed: (getattr(speed, figure), speed.size), default=None)


def size_speeds(
    num_rows: int, chosen: ChoiceCurve, rounds: Mapping[int, Round], serving: ServingSpeeds
) -> tuple[MachineSpeeds, ...]:
    """Every size on every machine at every concurrency."""
    changes = {c.size: (c.relative_change, c.lower, c.upper) for c in chosen.whole}
    changes[num_rows] = (0.0, 0.0, 0.0)
    machines = []
    for machine, concurrency in product(serving.machines, serving.concurrencies):
        drafting = {size: machine.round_seconds(rounds[size], concurrency) for size in changes}
        verify = serving.verify_seconds(concurrency)
        speeds = tuple(
            _speed(size, change, drafting[size], drafting[num_rows], verify)
            for size, change in changes.items()
        )
        machines.append(MachineSpeeds(gpu=machine.gpu.name, concurrency=concurrency, speeds=speeds))
    return tuple(machines)


def _speed(
    size: int, changes: Sequence[float], drafting: float, whole: float, verify: float | None
) -> SizeSpeed:
    speed_up, lower, upper = (
        None if verify is None else (1 + change) * (whole + verify) / (drafting + verify) - 1
        for change in changes
    )
    return SizeSpeed(
        size=size,
        drafting=drafting,
        pays_below=_pays_below(changes[0], drafting, whole),
        verify=verify,
        speed_up=speed_up,
        lower=lower,
        upper=upper,
    )


def _pays_below(change: float, drafting: float, whole: float) -> float | None:
    """Where r (whole + v) = drafting + v, that is v = (r whole - drafting) / (1 - r)."""
    saved = (1 + change) * whole - drafting
    if saved <= 0:
        return None
    return math.inf if change >= 0 else saved / -change


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeEstimate:
    """Bytes that drafting reads at concurrency 1, the head's share of them, and speed, by rows.

    `off_domain`: with rows chosen without a prompt's own category; empty where there are none.
    """

    drafting_bytes: Mapping[int, int]
    head_bytes: Mapping[int, int]
    context: int
    speeds: tuple[MachineSpeeds, ...]
    off_domain: tuple[MachineSpeeds, ...]


def size_estimate(draft: Draft, curve: SizeCurve, serving: ServingSpeeds) -> SizeEstimate:
    """Estimate every size of a curve of an unquantized draft, by its headers."""
    context = usual_context(draft.checkpoint.config)
    served = VerifyStep(curve.num_draft_tokens, context)
    drafts = {size: with_vocabulary(draft, size) for size in curve.sizes} | {curve.num_rows: draft}
    rounds = {size: draft_round(cut, plain_weights(cut), served) for size, cut in drafts.items()}
    outside = curve.off_domain
    return SizeEstimate(
        drafting_bytes={size: r.nbytes(1) for size, r in rounds.items()},
        head_bytes={size: r.nbytes(1, "head") for size, r in rounds.items()},
        context=context,
        speeds=size_speeds(curve.num_rows, curve.chosen, rounds, serving),
        off_domain=() if outside is None else size_speeds(curve.num_rows, outside, rounds, serving),
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
        figures: dict[str, object] = {}
        if self.curve is not None:
            figures |= self.curve.brief()
        if self.cut is not None and self.rows is not None:
            figures |= {**self.cut.brief(), "held-out coverage": f"{self.rows.held_out:.2%}"}
        return figures | {"warnings": len(self.warnings) or None}
