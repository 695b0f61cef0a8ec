"""What a plan must know about the inputs of its linears: static scales and second moments.

One matrix [in, in] for linears that read the same inputs. Matrices are in memory while they are
measured; afterwards they are in files that are mapped when needed. Where a draft has
many layers or experts, only as many as `BYTES_AT_ONCE` holds are measured at once: the others when
the first of them is needed, with one more run over the traces for each group.

Products of `_ROWS` inputs are computed in float32 and added up in float64. A matrix is symmetric:
of each strip of its rows, only the columns from these rows on are computed and held.

An expert sees the tokens that are routed to it. With fewer than `LEAST_PER_COLUMN` inputs for each
of its columns nothing is used: chance correlations would be taken for real. Measured on rows
of 512 columns whose inputs' variances fall like 1 / sqrt(k), GPTQ's error on other inputs, nearest
= 1: 2.4 from 256 inputs, 1.2 from 1024, 0.9 from 4096; where they fall like 1 / k, 1.0, 0.5, 0.4.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from ...quantize.algorithms import InputMoments, Need, Statistics
from ...quantize.algorithms.algorithm import DAMPING_PER_INPUT, DAMPINGS
from ...quantize.backends import get_backend
from ...quantize.drafts.engine_traits import fused_group
from ...quantize.drafts.forward import OnInput
from ...quantize.drafts.passes import BlockForward
from ...quantize.drafts.shared.mixture import is_expert
from ...quantize.files.provenance import GptqFactors
from ...quantize.planning.quantization_plan import NOTHING_MEASURED, MeasuredInputs, Plan
from ...quantize.stored.layouts.scheme import declared_activations
from ...quantize.stored.loading import LoadedDraft
from ...quantize.stored.online_rounding import InputRounding, kernel_scale
from ...recipes.errors import CalibrationError
from ...recipes.listener import Progress, unseen
from ..passes.draft_inputs import DraftRun
from ..traces.held_out import seen_prompts
from .static_scales import balanced_run, calibrated_scales, never_run, run_over_traces

_ROWS = 2048  # inputs multiplied at a time
_STRIP = 1024  # rows of a matrix that begin at one column
BYTES_AT_ONCE = 4 << 30  # of matrices that are measured together
LEAST_PER_COLUMN = 2  # inputs that an expert must have seen for each of its columns
BLOCK_ROW_STRIDE = 4
"""Distance of the rows from which blocks are drafted: neighbours' blocks read almost the same."""


class MomentsAlongTraces(Statistics):
    """`Statistics` of `quantize.algorithms`, measured on recorded traces.

    For linears that are `corrected` for this rounding, what it takes from the inputs is measured as
    well. The matrices, 4 in^2 bytes each, are in the folder `spool`.
    """

    def __init__(
        self,
        run: DraftRun,
        *,
        spool: Path,
        rounding: OnInput = lambda _name, x: x,
        corrected: Collection[str] = (),
        precise: bool = False,
        on_progress: Progress = unseen,
    ) -> None:
        self._run, self._draft, self._spool = run, run.draft, spool
        self._rounding, self._on_progress = rounding, on_progress
        self._corrected, self._precise = corrected, precise
        self._damping: dict[str, float] = {}
        self._leaders: dict[str, str] = {}
        self._groups: list[tuple[str, ...]] = []
        self._at: int | None = None
        self._seen: dict[str, int] = {}

    @override
    def measure(self, modules: Sequence[str]) -> None:
        """Measure inputs along the traces; those that do not fit in memory follow later."""
        self._leaders = _leaders(self._draft, modules)
        self._groups = _groups(self._draft, frozenset(self._leaders.values()), self._corrected)
        if self._groups:
            self._measure_group(0)

    @property
    @override
    def too_few(self) -> Mapping[str, int]:
        least = {leader: LEAST_PER_COLUMN * _columns(self._draft, leader) for leader in self._seen}
        return {
            name: self._seen[leader]
            for name, leader in self._leaders.items()
            if is_expert(leader) and leader in self._seen and self._seen[leader] < least[leader]
        }

    @property
    @override
    def factors(self) -> GptqFactors:
        used = {n: self._damping[at] for n, at in self._leaders.items() if at in self._damping}
        corrected = {n: d for n, d in used.items() if self._leaders[n] in self._corrected}
        return GptqFactors(
            dtype="float64" if self._precise else "float32",
            damping={n: d for n, d in used.items() if d > self._usual_damping(self._leaders[n])},
            input_correction=corrected,
        )

    def _usual_damping(self, leader: str) -> float:
        if leader not in self._corrected:
            return DAMPINGS[0]
        return DAMPINGS[0] + DAMPING_PER_INPUT * _columns(self._draft, leader) / self._seen[leader]

    def _measure_group(self, number: int) -> None:
        for leader in self._groups[self._at] if self._at is not None else ():
            for file in self._files(leader):
                file.unlink(missing_ok=True)
        self._at = number
        sums = {leader: _Sum(leader in self._corrected) for leader in self._groups[number]}

        def observe(name: str, x: Tensor) -> Tensor:
            rounded = self._rounding(name, x)
            if name in sums:
                sums[name].add(x, rounded)
            return rounded

        forward = self._draft.family.forward(self._draft.geometry, self._draft.weights, observe)
        run_over_traces(
            forward,
            self._run,
            row_stride=BLOCK_ROW_STRIDE if isinstance(forward, BlockForward) else 1,
            on_progress=self._on_progress,
        )
        for leader in self._groups[number]:
            moments = sums.pop(leader)
            if moments.count == 0 and not is_expert(leader):
                raise never_run(self._run, leader)
            self._seen[leader] = moments.count
            if moments.count and not moments.save_means(*self._files(leader)):
                what = "an input is NaN or infinite"
                fix = "its weights are finite, but too large to compute with: export it again"
                raise CalibrationError(f"{self._draft.name}: {leader}", what, fix=fix)

    @override
    def second_moments(self, modules: Sequence[str]) -> Mapping[str, InputMoments]:
        leaders = {name: self._leaders[name] for name in modules}
        moments: dict[str, InputMoments] = {}
        for number, group in enumerate(self._groups):
            asked = set(leaders.values()).intersection(group)
            if asked and number != self._at:
                self._measure_group(number)
            # Map them before the next group is measured: a mapped file may be removed.
            moments |= {leader: self._mapped(leader) for leader in asked - self.too_few.keys()}
        return {name: moments[leader] for name, leader in leaders.items() if leader in moments}

    def _files(self, leader: str) -> tuple[Path, Path]:
        """Files of second moments, and of what rounding takes from the inputs."""
        return self._spool / f"{leader}.npy", self._spool / f"{leader}.lost.npy"

    def _mapped(self, leader: str) -> InputMoments:
        mean, lost = self._files(leader)

        def keep(damping: float) -> None:
            self._damping[leader] = damping

        return InputMoments(
            _mapped_matrix(mean),
            self._draft.device,
            lost=_mapped_matrix(lost) if leader in self._corrected else None,
            damping=self._usual_damping(leader),
            precise=self._precise,
            name=leader,
            on_factor=keep,
        )


def _mapped_matrix(file: Path) -> Tensor:
    return torch.from_numpy(np.load(file, mmap_mode="c"))  # copy on write: torch wants writable


class _Sum:
    """The sum of x xᵀ over rounded inputs x, 4 in^2 bytes, and their number.

    Where it corrects, also the sum of e xᵀ, with e what rounding took from an input: 8 in^2 bytes.
    """

    def __init__(self, corrects: bool) -> None:
        self.count, self._finite = 0, True
        self._corrects = corrects
        self._strips: list[Tensor] = []
        self._lost_strips: list[Tensor] = []
        self._waiting: list[Tensor] = []
        self._lost: list[Tensor] = []

    def add(self, x: Tensor, rounded: Tensor) -> None:
        """Add all inputs [..., in], unrounded and as they are read."""
        rows, whole = (t.reshape(-1, t.shape[-1]) for t in (rounded, x))
        self.count += len(rows)
        for part, before in zip(torch.split(rows, _ROWS), torch.split(whole, _ROWS), strict=True):
            if sum(map(len, self._waiting)) + len(part) > _ROWS:
                self._multiply()
            self._waiting.append(part.clone())  # the draft may change it later
            if self._corrects:
                self._lost.append(before - part)

    def _multiply(self) -> None:
        rows = torch.cat(self._waiting).float()
        self._waiting.clear()
        starts = range(0, rows.shape[1], _STRIP)
        _add_up(
            self._strips, (rows[:, start : start + _STRIP].T @ rows[:, start:] for start in starts)
        )
        if self._corrects:
            lost = torch.cat(self._lost).float()
            self._lost.clear()
            products = (lost[:, start : start + _STRIP].T @ rows for start in starts)
            _add_up(self._lost_strips, products)

    @torch.inference_mode()
    def save_means(self, file: Path, lost_file: Path) -> bool:
        """Write them, float32, unless they hold NaN or infinity; the sums are freed."""
        self._multiply()
        columns = self._strips[0].shape[1]
        matrix = _new_matrix(file, columns)
        lost = _new_matrix(lost_file, columns) if self._corrects else None
        for start in range(0, columns, _STRIP):
            strip = self._mean(self._strips.pop(0))
            matrix[start : start + _STRIP, start:] = strip.numpy()
            matrix[start:, start : start + _STRIP] = strip.T.numpy()
            if lost is not None:
                lost[start : start + _STRIP] = self._mean(self._lost_strips.pop(0)).numpy()
        return self._finite

    def _mean(self, strip: Tensor) -> Tensor:
        mean = strip.div_(self.count).float().cpu()
        self._finite &= bool(mean.isfinite().all())
        return mean


def _add_up(strips: list[Tensor], products: Iterable[Tensor]) -> None:
    for number, product in enumerate(products):
        if number == len(strips):
            strips.append(product.double())
        else:
            strips[number].add_(product)


def _new_matrix(file: Path, columns: int) -> np.memmap[Any, np.dtype[np.float32]]:
    shape = (columns, columns)
    return np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=shape)


def _leaders(draft: LoadedDraft, modules: Sequence[str]) -> dict[str, str]:
    """Module -> the first of those that read exactly the same inputs.

    Linears that engines fuse do, except the queries of a block draft: keys and values read the
    context as well.
    """
    blocks = isinstance(draft.forward, BlockForward)
    first: dict[tuple[str, str], str] = {}
    leaders = {}
    for name in modules:
        parent, _, leaf = name.rpartition(".")
        alone = blocks and leaf in ("q_proj", "q_a_proj")
        leaders[name] = first.setdefault((parent, leaf) if alone else fused_group(name), name)
    return leaders


def _groups(
    draft: LoadedDraft, leaders: Collection[str], corrected: Collection[str]
) -> list[tuple[str, ...]]:
    """Leaders that are measured together, as many as fit, in the order of the draft."""
    specs = draft.family.tensor_specs(draft.geometry)
    order = {name.removesuffix(".weight"): i for i, name in enumerate(specs)}
    groups: list[list[str]] = [[]]
    held = 0
    for leader in sorted(leaders, key=lambda name: (order.get(name, len(order)), name)):
        cell = 12 if leader in corrected else 4
        nbytes = cell * _columns(draft, leader) ** 2 if f"{leader}.weight" in draft.weights else 0
        if groups[-1] and held + nbytes > BYTES_AT_ONCE:
            groups.append([])
            held = 0
        groups[-1].append(leader)
        held += nbytes
    return [tuple(group) for group in groups if group]


def _columns(draft: LoadedDraft, module: str) -> int:
    return draft.weights[f"{module}.weight"].shape[1]


def need_of(plan: Plan) -> Need:
    """What the plan's algorithm must know about inputs."""
    return get_backend(plan.recipe.backend, plan.recipe.algorithm).needs


def why_unused(plan: Plan, static: MeasuredInputs) -> str | None:
    """Why traces would tell a plan nothing; None where it needs a measurement."""
    recipe, algorithm = plan.recipe, plan.recipe.algorithm
    if recipe.kv_cache is not None and recipe.kv_cache.needs_traces:
        return None
    if need_of(plan) != "none" or (recipe.needs_input_scales and not static.input_scales):
        return None
    if recipe.needs_input_scales:
        return f"--input-scale gives the static scales, and {algorithm} looks at no inputs"
    return f"recipe {recipe.name} stores no static input scales, and {algorithm} looks at no inputs"


def measured_inputs(
    plan: Plan,
    run: DraftRun,
    *,
    spool: Path,
    static: MeasuredInputs = NOTHING_MEASURED,
    precise: bool = False,
    on_progress: Progress = unseen,
    on_stage_progress: Progress = unseen,
) -> MeasuredInputs:
    """Static scales now, and moments stage by stage when `quantize_draft` asks for them.

    Where the plan needs neither, the traces are not read (`why_unused`).
    """
    if why_unused(plan, static):
        return static
    if plan.recipe.needs_input_scales and not static.input_scales:
        static = calibrated_scales(plan, run, on_progress)
    statistics = None
    if need_of(plan) == "second_moments":
        statistics = MomentsAlongTraces(
            balanced_run(run, plan),
            spool=spool,
            rounding=served_rounding(plan, static, run.draft.device),
            corrected=corrected_linears(plan),
            precise=precise,
            on_progress=on_stage_progress,
        )
    return replace(static, statistics=statistics, prompts=seen_prompts(run.traces))


def corrected_linears(plan: Plan) -> frozenset[str]:
    """Linears whose weights compensate the rounding of their inputs, by canonical names."""
    return frozenset(
        step.row.canonical.removesuffix(".weight")
        for step in plan.quantized
        if plan.recipe_of(step).algorithm.input_correction == "auto"
        and plan.format_of(step).has_coarse_inputs
    )


WANTED_PER_COLUMN = 32
"""Inputs for each column of a weight: with four times as many, correction gains hardly more.
Measured by the divergence on other prompts, NVFP4 on EAGLE-3 Llama: see experiments/rounding.md."""


def few_for_correction(plan: Plan, run: DraftRun) -> str | None:
    """A warning before anything runs, where correction wants more prompts than there are; or None.

    Nothing about experts: which tokens reach them shows only when the draft runs.
    """
    columns = {
        name: _columns(run.draft, name)
        for name in sorted(corrected_linears(plan))
        if not is_expert(name)
    }
    entries = run.traces.manifest.prompts
    rows = sum(len(run.rows(entry)) for entry in entries)
    is_block = isinstance(run.draft.forward, BlockForward)
    inputs = rows * run.num_draft_tokens // (BLOCK_ROW_STRIDE if is_block else 1)
    name = max(columns, key=columns.__getitem__, default=None)
    if name is None or inputs >= WANTED_PER_COLUMN * columns[name]:
        return None
    wanted = math.ceil(len(entries) * WANTED_PER_COLUMN * columns[name] / max(1, inputs))
    return (
        f"input correction: {len(entries)} prompts give at least {inputs:,} inputs for the"
        f" {columns[name]:,} columns of {name}; from {WANTED_PER_COLUMN} for each column on, more"
        f" hardly help: about {wanted:,} prompts like these. With fewer, weights are corrected less"
    )


def served_rounding(plan: Plan, static: MeasuredInputs, device: torch.device) -> InputRounding:
    """Inputs of the quantized linears as kernels will round them."""
    activations, scales = {}, {}
    for step in plan.quantized:
        name = step.row.canonical.removesuffix(".weight")
        how = activations[name] = declared_activations(plan.format_of(step).activations)
        if static.input_scales and plan.format_of(step).needs_input_scale:
            scale = torch.tensor(static.input_scales[step.row.module], device=device)
            scales[name] = kernel_scale(how, scale)
    return InputRounding(activations, scales, None)
