"""What one process of `bench_replay` does: replay, record, or make what is run."""

import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..api.arguments import ComputeDtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ...quantize.stored.loading import LoadedDraft

NEW_TOKENS = 8
"""Of a recording: each reads all weights of the target once."""


def _replay(
    drafts: Sequence[str],
    traces: str,
    device: str,
    dtype: ComputeDtype,
    batch_size: int | None,
    num_draft_tokens: int,
) -> Mapping[str, Any]:
    import torch

    from ...calibration.passes.devices import peak_bytes
    from ...calibration.passes.memory import estimate_replay
    from ...calibration.traces.trace_folder import TraceFolder
    from ...validate.counting.trace_replay import replay_drafts
    from ..api.replay import OnTracesSettings, load_for_replay
    from ..console import OnTerminal

    settings = OnTracesSettings(
        listener=OnTerminal(), device=device, dtype=dtype, batch_size=batch_size
    )
    opened = TraceFolder.open(Path(traces))
    start = time.perf_counter()
    loaded = load_for_replay(drafts, opened, settings)
    counters = [_Multiplications(draft) for draft in loaded.drafts]
    middle, used = time.perf_counter(), time.process_time()
    found = replay_drafts(
        loaded.drafts,
        opened,
        num_draft_tokens=num_draft_tokens,
        batch_size=batch_size,
        max_tokens=loaded.max_tokens,
    )
    end, used = time.perf_counter(), time.process_time() - used
    needed = sum(counter.count for counter in counters)
    on_gpu = loaded.device.type != "cpu"
    estimate = estimate_replay(
        [Path(draft) for draft in drafts],
        opened,
        dtype=getattr(torch, dtype),
        device=loaded.device,
        num_draft_tokens=num_draft_tokens,
        batch_size=batch_size,
    )
    return {
        "tokens": opened.manifest.num_tokens * len(drafts),
        "seconds": end - middle,
        "load_seconds": middle - start,
        "estimated_bytes": estimate.total,
        "peak_gpu_bytes": peak_bytes(loaded.device) if on_gpu else None,
        "share_of_gemm": needed
        * _seconds_each(dtype, loaded.device)
        / (end - middle if on_gpu else used),
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


def _record(
    target: str, out: str, device: str, prompts: int, prompt_length: int, dtype: Any,
    batch_size: int,
) -> Mapping[str, Any]:  # fmt: skip
    import torch

    from ...calibration.passes.devices import peak_bytes, resolve_device
    from ...calibration.prompts.prompt_file import Prompt
    from ...calibration.recording.record_traces import record_traces
    from ...calibration.recording.target_model import Placement

    placement = Placement(device=resolve_device(device))
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size + prompts, prompt_length)  # the first batch, after loading, is not counted
    ids = torch.randint(1, 1000, shape, generator=generator).tolist()
    asked = [Prompt(id=f"p{i}", category="all", token_ids=tuple(row)) for i, row in enumerate(ids)]
    begun, finished = time.perf_counter(), list[tuple[float, float]]()

    def hear(done: int, total: int) -> None:
        finished.append((done / total, time.perf_counter()))

    with tempfile.TemporaryDirectory(dir=out) as folder:
        record_traces(
            Path(target),
            asked,
            Path(folder) / "traces",
            max_new_tokens=NEW_TOKENS,
            aux_layer_ids=(0, 1),
            dtype=dtype,
            batch_size=batch_size,
            placement=placement,
            on_progress=hear,
        )
    on_gpu = placement.device.type == "cuda"
    first = batch_size / (batch_size + prompts)
    loaded = next(moment for share, moment in finished if share >= first)
    return {
        "tokens": prompts * (prompt_length + NEW_TOKENS),
        "seconds": finished[-1][1] - loaded,
        "load_seconds": loaded - begun,
        "peak_gpu_bytes": peak_bytes(placement.device) if on_gpu else None,
    }


def _make_traces(draft: str, out: str, prompts: int, tokens: int) -> Mapping[str, Any]:
    from .real_shapes.traces import TraceSize, write_traces

    write_traces(Path(draft), Path(out), TraceSize(prompts=prompts, tokens=tokens, seed=0))
    return {}


def _make_target(draft: str, divide: int, out: str) -> Mapping[str, Any]:
    from .real_shapes.generate import write_target

    write_target(Path(out), draft, divide=divide)
    return {}


JOBS: Mapping[str, Callable[..., Mapping[str, Any]]] = {
    "replay": _replay,
    "record": _record,
    "make traces": _make_traces,
    "make target": _make_target,
}


def run_job(described: str) -> None:
    """Do one job, {"kind", "options"} as JSON, and print its figures as JSON."""
    job = json.loads(described)
    print(json.dumps(JOBS[job["kind"]](**job["options"])))
