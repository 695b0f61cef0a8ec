"""Tokens per second and memory of replay, on a draft pair of real size, in one run.

    python -m benchmarks.replay WORKDIR [--draft NAME] [--divide 1] [--recipe mi325x-w4a8]
        [--prompts 4] [--tokens 64] [-k 3 7] [--dtype bfloat16] [--batch-size 1 0]
        [--device auto] [--json]

Each measurement is a process of its own. The pair of random weights and traces of which it is right
about a share (see `real_shapes.traces`) are made once and stay in WORKDIR. "of GEMM" is the share
of the time that one large product would take for the same multiplications.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftquant.scripts.dev.real_shapes.drafts import DEFAULT_DRAFT, REAL_DRAFTS
from draftquant.scripts.dev.real_shapes.traces import TraceSize, write_traces
from draftquant.scripts.frame.console import stderr

from .command_line import add_draft, benchmark_parser, given_draft, run_benchmark
from .measured_process import draftquant, run_measured

if TYPE_CHECKING:
    import torch
    from draftquant.quantize.stored.loading import LoadedDraft
    from torch import Tensor

WHOLE = [name for name, one in REAL_DRAFTS.items() if "embed_tokens" in one.shapes(one.config())]
"""Drafts with an embedding and a head of their own."""
DTYPES = ("float32", "bfloat16")
CHILD = "import sys; from benchmarks.replay import run; run(sys.argv[1])"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one process took.

    Attributes:
        tokens: of all prompts, replayed by every draft.
        seconds: of replaying alone. load_seconds: of loading before it.
        cpu_seconds: of the whole process, of all its threads.
        share_of_gemm: how much of its time a replay would take at the rate of one large product.
        acceptance_length: of the first draft.
        peak_bytes: of the process, or on its GPU. estimated_bytes: by the headers.
        error: last line of stderr where it failed; its figures then mean nothing.
    """

    name: str
    tokens: int = 0
    seconds: float = 0.0
    load_seconds: float = 0.0
    cpu_seconds: float = 0.0
    share_of_gemm: float = 0.0
    acceptance_length: float = 0.0
    peak_bytes: int = 0
    estimated_bytes: int = 0
    error: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `run_benchmark`."""
    parser = benchmark_parser("replay", "Time the replay of a draft pair of real size.")
    add_draft(parser, DEFAULT_DRAFT, WHOLE)
    parser.add_argument("--recipe", default="mi325x-w4a8", help="of the second draft")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="of each prompt")
    parser.add_argument("-k", "--num-draft-tokens", type=int, nargs="+", default=[3])
    parser.add_argument("--dtype", nargs="+", default=[*DTYPES], choices=DTYPES)
    parser.add_argument("--batch-size", type=int, nargs="+", choices=(0, 1), default=[1, 0],
                        help="1 = one prompt at a time, 0 = prompts together")  # fmt: skip
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:I")
    return run_benchmark(parser, arguments, _measure, _columns)


def _measure(asked: argparse.Namespace) -> list[Row]:
    draft = given_draft(asked)
    quantized = asked.workdir / f"{draft.name}-{asked.recipe}"
    traces = asked.workdir / f"{draft.name}-traces-{asked.prompts}x{asked.tokens}"
    if not quantized.exists():
        draftquant("quantize", str(draft), "--recipe", asked.recipe, "--out", str(quantized))
    if not traces.exists():
        write_traces(draft, traces, TraceSize(prompts=asked.prompts, tokens=asked.tokens, seed=0))
    rows = []
    for k in asked.num_draft_tokens:
        for dtype in asked.dtype:
            for size in asked.batch_size:
                together = "one prompt at a time" if size else "prompts together"
                options = {
                    "drafts": [str(draft), str(quantized)],
                    "traces": str(traces),
                    "device": asked.device,
                    "dtype": dtype,
                    "batch_size": size or None,
                    "num_draft_tokens": k,
                }
                rows.append(_row(f"{dtype}, K = {k}, {together}", options))
    return rows


def _row(name: str, options: dict[str, Any]) -> Row:
    """Replay in a process of its own."""
    stderr().line(name)
    taken = run_measured(sys.executable, "-c", CHILD, json.dumps(options))
    if taken.error:
        return Row(name=name, error=taken.error)
    found = json.loads(taken.stdout.splitlines()[-1])
    peak = found.pop("peak_gpu_bytes") or taken.peak_bytes
    return Row(name=name, cpu_seconds=taken.cpu_seconds, peak_bytes=peak, **found)


def _columns(row: Row) -> dict[str, str]:
    rate = row.tokens / row.seconds if row.seconds else 0.0
    return {
        "run": row.name,
        "tokens": row.error or f"{row.tokens:,}",
        "seconds": f"{row.seconds:.1f}",
        "tokens/s": f"{rate:.1f}",
        "CPU s": f"{row.cpu_seconds:.1f}",
        "of GEMM": f"{row.share_of_gemm:.0%}",
        "length": f"{row.acceptance_length:.2f}",
        "load s": f"{row.load_seconds:.1f}",
        "peak GB": f"{row.peak_bytes / 1e9:.2f}",
        "estimate GB": f"{row.estimated_bytes / 1e9:.2f}",
    }


def run(options: str) -> None:
    """Replay once, as told in JSON, and print the figures as JSON."""
    print(json.dumps(timed_replay(**json.loads(options))))


def timed_replay(
    drafts: Sequence[str],
    traces: str,
    device: str,
    dtype: Any,
    batch_size: int | None,
    num_draft_tokens: int,
) -> dict[str, Any]:
    """What a replay in this process takes; see `Row`."""
    import torch
    from draftquant.calibration.passes import Passes
    from draftquant.calibration.passes.devices import peak_bytes
    from draftquant.calibration.passes.loaded_drafts import load_for_replay
    from draftquant.calibration.passes.memory import estimate_replay
    from draftquant.calibration.traces.trace_folder import TraceFolder
    from draftquant.scripts.frame.console import OnTerminal
    from draftquant.validate.counting.trace_replay import replay_drafts

    how = Passes(listener=OnTerminal(), device=device, dtype=dtype, batch_size=batch_size)
    opened = TraceFolder.open(Path(traces))
    start = time.perf_counter()
    loaded = load_for_replay([Path(draft) for draft in drafts], opened, how)
    counters = [_Multiplications(draft) for draft in loaded.drafts]
    middle, used = time.perf_counter(), time.process_time()
    found = replay_drafts(
        loaded.drafts,
        opened,
        num_draft_tokens=num_draft_tokens,
        batch_size=batch_size,
        max_tokens=loaded.max_tokens,
    )
    seconds, used = time.perf_counter() - middle, time.process_time() - used
    on_gpu = loaded.device.type != "cpu"
    estimate = estimate_replay(
        [Path(draft) for draft in drafts],
        opened,
        dtype=getattr(torch, dtype),
        device=loaded.device,
        num_draft_tokens=num_draft_tokens,
        batch_size=batch_size,
    )
    needed = sum(counter.count for counter in counters) * _seconds_each(dtype, loaded.device)
    return {
        "tokens": opened.manifest.num_tokens * len(drafts),
        "seconds": seconds,
        "load_seconds": middle - start,
        "estimated_bytes": estimate.total,
        "peak_gpu_bytes": peak_bytes(loaded.device) if on_gpu else None,
        "share_of_gemm": needed / (seconds if on_gpu else used),
        "acceptance_length": found[0].counts.mean_acceptance_length,
    }


class _Multiplications:
    """Counts the multiplications of a draft's linears, head and fc among them, as they are made."""

    def __init__(self, draft: "LoadedDraft") -> None:
        self.count = 0
        self._draft, self._before = draft, draft.forward.on_input
        draft.forward.on_input = self._seen

    def _seen(self, name: str, x: "Tensor") -> "Tensor":
        weight = self._draft.weights.get(f"{name}.weight")  # none of its own: a tied head
        if weight is None:
            weight = self._draft.weights["embed_tokens.weight"]
        self.count += math.prod(x.shape[:-1]) * weight.numel()
        return self._before(name, x)


def _seconds_each(dtype: str, device: "torch.device") -> float:
    """Of one multiplication in a large product: of the processor on a CPU, else by the clock."""
    import torch
    from torch.nn import functional

    x, weight = (torch.randn(4096, 2048, device=device, dtype=getattr(torch, dtype)) for _ in "xw")
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    taken = []
    for _ in range(4):
        begun = clock()
        float(functional.linear(x, weight)[0, 0])
        taken.append(clock() - begun)
    return min(taken) / (4096 * 4096 * 2048)


if __name__ == "__main__":
    sys.exit(main())
