"""How fast the slow stages are on a device: GPTQ, a step of learning, replay, recording."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from draftquant.calibration.passes.draft_inputs import DraftRun
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.recording.target_model import Placement
from draftquant.calibration.rounding.learn import learned_codes
from draftquant.calibration.rounding.learned_state import LearningSettings
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.algorithms import InputMoments
from draftquant.quantize.backends import get_backend
from draftquant.quantize.inspection import open_draft
from draftquant.quantize.making.execute import GPU_BLOCK_BYTES
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes import load_recipe
from draftquant.recipes.chosen_recipe import with_algorithm
from draftquant.recipes.schema import Algorithm
from draftquant.scripts.dev.real_shapes.drafts import REAL_DRAFTS
from draftquant.scripts.dev.real_shapes.generate import write_real_shape_draft
from draftquant.scripts.dev.real_shapes.traces import TraceSize, write_traces
from gpu.rows import Row, Run
from gpu.same import synthetic_moments
from recorded import record_traces

from benchmarks.replay import timed_replay

DRAFT = "kimi-k2.5-eagle3"
TABLE = "How fast"


def synchronize(device: torch.device) -> None:
    """Wait until everything that was queued is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, *, repeats: int = 3) -> float:
    """The median time of a call, by the host's clock, after one that is not counted."""
    work()
    found = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def gemm_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Floating-point operations per second of a large product, as this machine does it now."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return float(2 * size**3 / seconds_of(lambda: a @ b, device, repeats=5))


def _row(what: str, figure: str, beside: str = "") -> Row:
    return Row(table=TABLE, cells={"what": what, "figure": figure, "beside": beside})


def _divide(run: Run) -> int:
    return 16 if run.tiny else 1


def gptq_rate(run: Run) -> Iterator[Row]:
    """The head of the published shape by GPTQ: its factor, and its columns, block by block."""
    config = REAL_DRAFTS[DRAFT].config(_divide(run))
    rows, columns = REAL_DRAFTS[DRAFT].shapes(config)["lm_head"]
    recipe = load_recipe("int4-channel")
    backend = get_backend("torch", Algorithm(scale="absmax", rounding="gptq"))
    mean = synthetic_moments(columns, run.device)
    factor = seconds_of(lambda: InputMoments(mean, run.device).feedback(), run.device, repeats=1)
    yield _row(f"GPTQ, factor of {columns} columns", f"{factor:.2f} s")
    moments = InputMoments(mean, run.device)
    moments.feedback()
    step = max(1, GPU_BLOCK_BYTES // (2 * columns))
    generator = torch.Generator(run.device).manual_seed(0)
    block = torch.randn(min(step, rows), columns, generator=generator, device=run.device)
    block = (block * 0.02).bfloat16()
    absmax = block.abs().amax().float().reshape(1, 1)
    seconds = seconds_of(
        lambda: backend.quantize(block, recipe.weights, absmax, moments), run.device, repeats=2
    )
    blocks = rows / len(block)
    products = 2 * rows * columns**2 / 2
    gemm = gemm_rate(run.device, torch.float32, 256 if run.tiny else 8192)
    yield _row(
        f"GPTQ, columns of the head [{rows}, {columns}], {blocks:.1f} blocks",
        f"{seconds * blocks:.2f} s",
        f"its products alone at the rate of a large FP32 product: {products / gemm:.2f} s",
    )


def learned_and_replayed(run: Run) -> Iterator[Row]:
    """A draft of the published shape: a step of learning, then replay in both dtypes."""
    draft, traces = run.work / "draft", run.work / "traces"
    write_real_shape_draft(draft, draft=DRAFT, divide=_divide(run))
    prompts, tokens = (6, 40) if run.tiny else (48, 256)
    write_traces(draft, traces, TraceSize(prompts=prompts, tokens=tokens, seed=0))
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        rate = gemm_rate(run.device, dtype, 256 if run.tiny else 8192)
        found = timed_replay(
            drafts=[str(draft)], traces=str(traces), device=str(run.device), dtype=name,
            batch_size=None,
            num_draft_tokens=3,
        )  # fmt: skip
        yield _replay_row(run, traces, name, rate, found["seconds"])
    yield _row("learning, one step of 4 prompts", f"{_step_seconds(run, draft, traces):.3f} s",
               f"{tokens} tokens each")  # fmt: skip


def _replay_row(run: Run, traces: Path, dtype: str, rate: float, seconds: float) -> Row:
    """Tokens per second, and what share of the rate of a large product that is."""
    shapes = REAL_DRAFTS[DRAFT].shapes(REAL_DRAFTS[DRAFT].config(_divide(run)))
    layer = sum(s[0] * s[1] for n, s in shapes.items() if len(s) == 2 and "layer" in n)
    fc, head = (s[0] * s[1] for s in (shapes["fc"], shapes["lm_head"]))
    flops, tokens = 0, 0
    for entry in TraceFolder.open(traces).manifest.prompts:
        rows = entry.num_tokens - entry.prompt_length
        flops += 2 * (entry.num_tokens * (fc + layer) + rows * (2 * layer + 3 * head))
        tokens += entry.num_tokens
    share = flops / seconds / rate
    return _row(
        f"replay in {dtype}, K = 3, every depth of every row counted",
        f"{tokens / seconds:.0f} tokens/s",
        f"{share:.1%} of the rate of a large product ({rate / 1e12:.1f} TFLOP/s)",
    )


def _step_seconds(run: Run, draft: Path, traces: Path) -> float:
    _, headers = open_draft(str(draft))
    plan = make_plan(with_algorithm(load_recipe("int4-channel"), "learned"), headers)
    loaded = load_draft(draft, device=run.device, compact=True)
    ends: list[float] = []

    def note(_progress: object) -> None:
        synchronize(run.device)
        ends.append(time.perf_counter())

    settings = LearningSettings(steps=4, validate_every=4)
    along = DraftRun(loaded, TraceFolder.open(traces), 3)
    with learned_codes(
        plan, along, run.work / "learned", settings=settings, save_seconds=1e9, on_progress=note
    ):
        return (ends[2] - ends[0]) / 2


def record_rate(run: Run) -> Iterator[Row]:
    """Recording beside `generate` of transformers, on prompts of many lengths, one batch each."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    size = (64, 2, 128) if run.tiny else (2048, 16, 32_000)
    config = LlamaConfig(
        hidden_size=size[0], num_hidden_layers=size[1], vocab_size=size[2],
        intermediate_size=4 * size[0], num_attention_heads=size[0] // 32,
        num_key_value_heads=size[0] // 64, max_position_embeddings=4096, eos_token_id=None,
        bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    target = run.work / "target"
    model.save_pretrained(target)
    model = model.to(run.device).eval()
    count, new = (4, 8) if run.tiny else (64, 128)
    generator = torch.Generator().manual_seed(0)
    lengths = (16 + torch.randint(8 if run.tiny else 240, (count,), generator=generator)).tolist()
    ids = [torch.randint(1, size[2], (n,), generator=generator).tolist() for n in lengths]
    padded = torch.tensor([[0] * (max(lengths) - len(row)) + row for row in ids], device=run.device)
    mask = (padded != 0).long()

    tokens = count * new
    options = {"attention_mask": mask, "max_new_tokens": new, "do_sample": False}
    with torch.inference_mode():
        generate = functools.partial(model.generate, padded, **options)
        beside = tokens / seconds_of(generate, run.device, repeats=1)
    del model, generate
    prompts = [
        Prompt(id=f"p{i}", category="all", token_ids=tuple(row)) for i, row in enumerate(ids)
    ]
    begun: list[float] = []

    def hear(_done: int, _total: int) -> None:
        begun.append(time.perf_counter())

    start = time.perf_counter()
    record_traces(
        target, prompts, run.work / "recorded", max_new_tokens=new, dtype="bfloat16",
        aux_layer_ids=(0, 1) if run.tiny else (1, 7, 12), batch_size=count,
        placement=Placement(device=run.device), on_progress=hear,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    yield _row(
        f"record, {count} prompts of {min(lengths)} to {max(lengths)} tokens, loading counted",
        f"{tokens / seconds:.0f} new tokens/s",
        f"generate, one padded batch: {beside:.0f}",
    )
