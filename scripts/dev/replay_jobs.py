"""What one process of `bench_replay` does: replay, record, or make what is run."""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..api.arguments import ComputeDtype

PROMPT_LENGTH = 16
"""Of the traces that are made; shorter than their text."""
NEW_TOKENS = 8
"""Of a recording: each reads all weights of the target once."""


def _replay(
    drafts: Sequence[str], traces: str, device: str, dtype: ComputeDtype, batch_size: int | None
) -> Mapping[str, Any]:
    import torch

    from ...calibration.passes.devices import peak_bytes
    from ...calibration.passes.memory import estimate_replay
    from ...calibration.traces.trace_folder import TraceFolder
    from ...validate.counting.trace_replay import replay_drafts
    from ..api.replay import OnTracesSettings, load_for_replay
    from ..console import OnTerminal

    settings = OnTracesSettings(
        watch=OnTerminal(), device=device, dtype=dtype, batch_size=batch_size
    )
    opened = TraceFolder.open(Path(traces))
    start = time.perf_counter()
    loaded = load_for_replay(drafts, opened, settings)
    middle = time.perf_counter()
    replay_drafts(
        loaded.drafts,
        opened,
        num_draft_tokens=3,
        batch_size=batch_size,
        max_tokens=loaded.max_tokens,
    )
    end = time.perf_counter()
    estimate = estimate_replay(
        [Path(draft) for draft in drafts],
        opened,
        dtype=getattr(torch, dtype),
        device=loaded.device,
        num_draft_tokens=3,
        batch_size=batch_size,
    )
    return {
        "tokens": opened.manifest.num_tokens * len(drafts),
        "seconds": end - middle,
        "load_seconds": middle - start,
        "estimated_bytes": estimate.total,
        "peak_gpu_bytes": None if loaded.device.type == "cpu" else peak_bytes(loaded.device),
    }


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
    """Random text and features, as long as the job says; each prompt one token longer."""
    import torch

    from ...calibration.passes.draft_inputs import default_aux_layer_ids
    from ...calibration.traces.manifest import FeatureSpec, TargetIdentity
    from ...calibration.traces.prompt_trace import PromptTrace
    from ...calibration.traces.writer import trace_output
    from ...quantize.drafts import read_draft
    from ...quantize.files.checkpoint import Checkpoint

    g, num_layers = read_draft(Checkpoint.open(Path(draft))).geometry, 61
    generator = torch.Generator().manual_seed(0)
    identity = TargetIdentity(
        name="random",
        config_sha256=None,
        weights_sha256=None,
        num_layers=num_layers,
        vocab_size=g.vocab_size,
    )
    spec = FeatureSpec(
        kind="aux",
        width=g.num_aux_layers * g.target_hidden_size,
        dtype="bfloat16",
        aux_layer_ids=g.aux_layer_ids or default_aux_layer_ids(num_layers),
        fusion_sha256=None,
    )
    with trace_output(Path(out), identity, spec) as writer:
        for i in range(prompts):
            ids = torch.randint(g.vocab_size, (tokens + i,), generator=generator)
            features = torch.randn((tokens + i - 1, spec.width), generator=generator)
            trace = PromptTrace(
                id=f"p{i}",
                category="all",
                prompt_length=PROMPT_LENGTH,
                token_ids=ids,
                features=features.bfloat16(),
                target_top1=ids[1:],
            )
            writer.add(trace, position=i)
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
