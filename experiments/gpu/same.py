"""What a device computes beside what the CPU does: bits, codes, tokens, counts, verdicts."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import draftquant.api as dq
import torch
from draftquant.calibration.passes.draft_inputs import DraftRun
from draftquant.calibration.rounding.learn import learned_codes
from draftquant.calibration.rounding.learned_state import LearningSettings
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.backends import get_backend
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.layouts import get_layout
from draftquant.quantize.layouts.layout import GatheredColumns
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes import Recipe, built_in_recipes, load_recipe
from draftquant.recipes.errors import BackendError
from draftquant.recipes.schema import Algorithm
from gpu.rows import Row, Run
from safetensors.torch import load_file
from torch import Tensor

PAIRS = Path(__file__).resolve().parents[2] / "tests" / "pairs"
BITS = "The same bits as on the CPU"
SHARES = "The same as on the CPU, but for sums in another order"
CPU = torch.device("cpu")
SCALES = ("absmax", "mse")
RECIPES = ("fp8-ptpc", "int4-channel", "int4-group128", "mi325x-w4a8-fp8", "blackwell-nvfp4")
LEAST_GPTQ, LEAST_LEARNED = 0.97, 0.9
"""Shares of codes that must be equal. One code that a sum of another order moves to the next one
moves others of its row; learning runs in BF16 on a GPU."""


def encoders(run: Run) -> Iterator[Row]:
    """Codes, scales and packed bytes of every format that torch computes, on weights with ties."""
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[:4] = torch.arange(-512, 512) / 64  # ties of every format
    weight[4, ::3], weight[5], weight[6, 0] = 0, 1e-30, 3e4
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        narrow = weight.to(dtype)
        for name in built_in_recipes():
            for scale in SCALES:
                recipe = load_recipe(name)
                algorithm = Algorithm(scale=scale, rounding="nearest")  # type: ignore[arg-type]
                try:
                    get_backend("torch", algorithm).check(recipe.weights)
                except BackendError:
                    continue
                here, there = (_encoded(recipe, algorithm, narrow, d) for d in (CPU, run.device))
                wrong = [n for n, data in here.items() if not _same(data, there[n])]
                if wrong or (dtype, scale) == (torch.bfloat16, "absmax"):
                    yield _bits(f"{name}, {scale}, {dtype}", wrong)


def _encoded(
    recipe: Recipe, algorithm: Algorithm, weight: Tensor, device: torch.device
) -> dict[str, Tensor]:
    weight = weight.to(device)
    absmax = weight.abs().amax().float().reshape(1, 1)
    whole = absmax if recipe.weights.scales_whole_matrix else None
    block = get_backend("torch", algorithm).quantize(weight, recipe.weights, whole)
    found = get_layout(recipe.layout).encode_rows("a", block, recipe.weights)
    stored = {n: x.tensor if isinstance(x, GatheredColumns) else x for n, x in found.items()}
    return {**stored, "codes": block.codes, "scale": block.scale}


def _same(one: Tensor, other: Tensor) -> bool:
    a, b = (x.contiguous().cpu().view(torch.uint8) for x in (one, other))
    return torch.equal(a, b)


def _bits(what: str, wrong: list[str]) -> Row:
    said = f"OTHER: {', '.join(wrong)}" if wrong else "equal"
    return Row(table=BITS, cells={"what": what, "bits": said}, ok=not wrong)


def _share(what: str, share: float, least: float) -> Row:
    cells = {"what": what, "equal": f"{share:.4%}", "at least": f"{least:.0%}"}
    return Row(table=SHARES, cells=cells, ok=share >= least)


def verbs(run: Run) -> Iterator[Row]:
    """record, quantize, replay, gate and learning on a shipped pair, here and there."""
    pair, work = PAIRS / "eagle3-llama", run.work / "verbs"
    places = {"here": "cpu", "there": str(run.device)}
    work.mkdir()
    given = {"prompts": pair / "calibration.jsonl", "draft": pair / "draft", "dtype": "float32"}
    how = {"num_prompts": 8 if run.tiny else 24, "max_new_tokens": 48, **given}
    for name, device in places.items():
        dq.record(target=pair / "target", out=work / f"traces-{name}", device=device, **how)
    yield from _recorded(*(TraceFolder.open(work / f"traces-{name}") for name in places))
    on = {"traces": work / "traces-here", "target": pair / "target"}
    for recipe in RECIPES:
        needed = on if load_recipe(recipe).needs_input_scales else {}
        files = []
        for name, device in places.items():
            out = work / f"{recipe}-{name}"
            dq.quantize(pair / "draft", recipe, out, backend="torch", device=device, **needed)
            files.append((out / "model.safetensors").read_bytes())
        yield _bits(f"quantize {recipe}", [] if files[0] == files[1] else ["model.safetensors"])
    codes = []
    for name, device in places.items():
        out = work / f"gptq-{name}"
        dq.quantize(pair / "draft", "int4-channel", out, algorithm="gptq", device=device, **on)
        codes.append(load_file(out / "model.safetensors"))
    yield _share("quantize --algorithm gptq, int4-channel", _equal_nibbles(*codes), LEAST_GPTQ)
    yield from _judged(pair / "draft", work / "int4-channel-here", places.values(), on)
    yield _learned(run, work / "traces-here", pair)


def _judged(
    draft: Path, quantized: Path, devices: Iterable[str], on: Mapping[str, Path]
) -> Iterator[Row]:
    """Counts and verdicts."""
    counts, verdicts = [], []
    for device in devices:
        found = dq.replay([draft, quantized], device=device, no_cache=True, **on)
        counts.append([prompt.counts for one in found for prompt in one.prompts])
        judged = dq.gate(
            draft, quantized, device=device, policy="screening", no_cache=True, **on
        )  # fmt: skip
        verdicts.append(judged.verdict)
    same = [a == b for a, b in zip(*counts, strict=True)]
    yield _share("replay: counts of a prompt", sum(same) / len(same), 0.9)
    cells = {"what": "gate: the verdict", "equal": " / ".join(verdicts)}
    yield Row(table=SHARES, cells=cells, ok=verdicts[0] == verdicts[1])


def _recorded(here: TraceFolder, there: TraceFolder) -> Iterator[Row]:
    same = [torch.equal(a.token_ids, b.token_ids) for a, b in zip(here, there, strict=True)]
    yield _share("record: tokens of a prompt", sum(same) / len(same), 0.9)
    near = [
        float((a.features.float() - b.features.float()).norm() / a.features.float().norm())
        for a, b in zip(here, there, strict=True)
        if torch.equal(a.token_ids, b.token_ids)
    ]
    cells = {"what": "record: relative error of features", "equal": f"{max(near):.1e}"}
    yield Row(table=SHARES, cells=cells, ok=max(near) < 1e-3)


def _equal_nibbles(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The share of equal INT4 codes in packed words."""
    equal = total = 0
    for name, words in one.items():
        if name.endswith("weight_packed"):
            apart = words ^ other[name]
            equal += sum(int(((apart >> shift) & 15 == 0).sum()) for shift in range(0, 32, 4))
            total += 8 * words.numel()
    return equal / total


def _learned(run: Run, traces: Path, pair: Path) -> Row:
    """A few steps of learning: the codes, of which those that moved are few."""
    recipe = load_recipe("int4-channel")
    algorithm = dataclasses.replace(recipe.algorithm, rounding="learned")
    recipe = dataclasses.replace(recipe, algorithm=algorithm, backend="torch")
    plan = make_plan(recipe, read_draft(Checkpoint.open(pair / "draft")))
    settings = LearningSettings(steps=4, validate_every=2, warmup_steps=2)
    found: list[dict[str, Tensor]] = []
    for device in (CPU, run.device):
        draft = load_draft(pair / "draft", device=device)
        along = DraftRun(draft, TraceFolder.open(traces), 3)
        out = run.work / f"learned-{len(found)}"
        with learned_codes(plan, along, out, settings=settings) as codes:
            found.append({name: codes.quantized(name).codes for name in draft.linears})
    one, other = (torch.cat([x.flatten() for x in each.values()]) for each in found)
    equal = float((one == other).float().mean())
    return _share("learned codes after 4 steps", equal, LEAST_LEARNED)
