"""What a draft step costs by kernel, head and batch, and what `draftquant estimate` says of it."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.estimate.estimate_report import candidates_of
from draftquant.quantize.estimate.work import Machine, Part, Pass, VerifyStep
from draftquant.quantize.gpus import GPUS
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.recipes import load_recipe
from draftquant.scripts.dev.real_shapes.drafts import REAL_DRAFTS
from draftquant.scripts.dev.real_shapes.generate import write_sparse_model
from gpu.kernels import KERNELS, Kernel, relative_error
from gpu.rows import Row, Run
from gpu.timing import kernel_seconds
from torch import Tensor

DRAFT = "kimi-k2.5-eagle3"
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CUT = 32_768
_RECIPES = {
    "FP8 per tensor": "fp8-ptpc",
    "FP8 per row": "fp8-ptpc",
    "INT4 group 128": "int4-group128",
}
_LINEAR_PARTS: tuple[Part, ...] = ("attention", "mlp", "fusion")


def draft_step(run: Run) -> Iterator[Row]:
    """Each kernel right first, then timed: linears of the step, the head full, the head cut."""
    generator = torch.Generator(run.device).manual_seed(0)
    divide = 8 if run.tiny else 1  # whole groups of 128
    config = REAL_DRAFTS[DRAFT].config(divide)
    shapes = REAL_DRAFTS[DRAFT].shapes(config)
    linears = {n: (s[0], s[1]) for n, s in shapes.items() if len(s) == 2 and "layer" in n}
    heads = {"head": shapes["lm_head"], "head cut": (CUT // divide, shapes["lm_head"][1])}
    batches = BATCHES
    if run.tiny:  # the CPU has no fast product of FP8
        linears, batches = {"midlayer": (256, 256)}, (1, 4)
        heads = {"head": (512, 256), "head cut": (128, 256)}
    step = _estimated_step(run, config, shapes)
    machine = _machine(run)
    for kernel in KERNELS:
        whole: dict[str, list[float]] = {}
        for what, parts in {"linears": linears, **{h: {h: s} for h, s in heads.items()}}.items():
            made = [_made(kernel, shape, run, generator) for shape in parts.values()]
            yield _right(kernel, what, made, run, generator)
            whole[what] = [_seconds(made, batch, run, generator) for batch in batches]
            del made
        for what, seconds in whole.items():
            wanted = _estimates(step.get(kernel), machine, what, batches, heads)
            yield _row(f"{kernel}: {what}", batches, seconds, wanted)
        for head in heads:
            seconds = [a + b for a, b in zip(whole["linears"], whole[head], strict=True)]
            parts = [
                _estimates(step.get(kernel), machine, x, batches, heads) for x in ("linears", head)
            ]
            wanted = [a + b for a, b in zip(*parts, strict=True)] if all(parts) else []
            yield _row(f"{kernel}: step, {head}", batches, seconds, wanted)


def _made(
    kernel: str, shape: Sequence[int], run: Run, generator: torch.Generator
) -> tuple[Kernel, int]:
    weight = torch.randn(*shape, generator=generator, device=run.device) * 0.02
    return KERNELS[kernel](weight.bfloat16()), shape[1]


def _right(
    kernel: str, what: str, made: Sequence[tuple[Kernel, int]], run: Run, generator: torch.Generator
) -> Row:
    one, width = made[0]
    x = torch.randn(5, width, generator=generator, device=run.device).bfloat16()
    error = relative_error(one(*one.inputs(x)), x.float() @ one.widened().T)
    return Row(
        table="Kernels against a product in float32",
        cells={"kernel": kernel, "of": what, "relative error": f"{error:.2e}"},
        ok=error < one.tolerance,
    )


def _seconds(
    made: Sequence[tuple[Kernel, int]], batch: int, run: Run, generator: torch.Generator
) -> float:
    calls: list[tuple[Kernel, tuple[Tensor, ...]]] = []
    for kernel, width in made:
        x = torch.randn(batch, width, generator=generator, device=run.device).bfloat16()
        calls.append((kernel, kernel.inputs(x)))

    def step() -> None:
        for kernel, inputs in calls:
            kernel(*inputs)

    return kernel_seconds(step, run.device)


def _row(
    name: str, batches: Sequence[int], seconds: Sequence[float], wanted: Sequence[float]
) -> Row:
    cells = {"what": name}
    for i, batch in enumerate(batches):
        cells[f"batch {batch}"] = f"{seconds[i] * 1e6:.0f}"
        if wanted:
            cells[f"batch {batch}"] += f" ({seconds[i] / wanted[i]:.2f})"
    title = "A draft step in microseconds, inputs already rounded (over the data sheet's roofline)"
    return Row(table=title, cells=cells)


def _estimated_step(run: Run, config: dict[str, object], shapes: object) -> dict[str, Pass]:
    """Kernel -> the later passes of a round, as `estimate` counts their bytes and arithmetic."""
    folder = run.work / "headers"
    draft = read_draft(write_sparse_model(folder, config, shapes))  # type: ignore[arg-type]
    plans = [make_plan(load_recipe(name), draft) for name in dict.fromkeys(_RECIPES.values())]
    candidates = candidates_of(draft, plans, VerifyStep(3, 1))
    steps = {one.name: one.round.step for one in candidates}
    plain = candidates[0].round.step
    return {"BF16": plain} | {kernel: steps[recipe] for kernel, recipe in _RECIPES.items()}


def _machine(run: Run) -> Machine | None:
    """The GPU as the table of `estimate` has it, at its data sheet; None where it has none."""
    if run.device.type != "cuda":
        return Machine(gpu=GPUS["h100"], efficiency=1.0) if run.tiny else None
    name = torch.cuda.get_device_name(run.device).lower()
    known = next((gpu for key, gpu in GPUS.items() if key in name.split()), None)
    return None if known is None else Machine(gpu=known, efficiency=1.0)


def _estimates(
    step: Pass | None,
    machine: Machine | None,
    what: str,
    batches: Sequence[int],
    heads: dict[str, tuple[int, ...]],
) -> list[float]:
    """Seconds of a part; the heads as the kernel of the linears would read them."""
    if step is None or machine is None:
        return []
    if what == "linears":
        works = [w for w in step.works if w.part in _LINEAR_PARTS]
    else:
        share = heads[what][0] / heads["head"][0]
        (head,) = (w for w in step.works if w.part == "head")
        linear = next(w for w in step.works if w.part == "mlp")
        elements = head.sequence_flops // 2
        per_element = linear.weight_bytes / (linear.sequence_flops // 2)
        works = [
            dataclasses.replace(
                head,
                weight_bytes=round(elements * per_element * share),
                sequence_flops=round(head.sequence_flops * share),
                precision=linear.precision,
            )
        ]
    one = Pass(name=what, works=tuple(works))
    return [machine.pass_seconds(one, batch) for batch in batches]
