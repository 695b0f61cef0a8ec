"""Ranges by step and half: against an observer of the same chain that keeps everything."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from draftquant.calibration.errors import CalibrationError
from draftquant.calibration.linear_inputs.chain_ranges import (
    RangeKey,
    measure_ranges,
    merged,
    of_modules,
)
from draftquant.calibration.passes.draft_inputs import first_hidden
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.recording.record_traces import record_traces
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.drafts.forward import whole_rows
from draftquant.quantize.drafts.kinds.chain import ChainForward
from draftquant.quantize.stored.loading import load_draft
from tied_pair import prompt_tokens, save_draft, save_target
from torch import Tensor

K = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranges")
    save_draft(folder / "draft", save_target(folder / "target"))
    for name, count, start in (("traces", 3, 0), ("others", 2, 3)):
        prompts = [
            Prompt(id=f"p{i}", category="a", token_ids=ids)
            for i, ids in enumerate(prompt_tokens(5, 9)[start : start + count])
        ]
        record_traces(folder / "target", prompts, folder / name, max_new_tokens=16)
    return folder


def test_every_step_has_its_own_range(folder: Path) -> None:
    draft, traces = load_draft(folder / "draft"), TraceFolder.open(folder / "traces")
    found = measure_ranges(draft, traces, num_draft_tokens=K)
    kept: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
    now = {"step": 0}

    def keep(name: str, x: Tensor) -> Tensor:
        kept[name, now["step"]].append(x.clone())
        return x

    forward = draft.family.forward(draft.geometry, draft.weights, keep)
    assert isinstance(forward, ChainForward)
    for trace in traces:
        passes = forward.passes(
            first_hidden(draft, traces, trace)[None],
            trace.token_ids[None],
            rows=whole_rows(trace.num_tokens, K, first_row=trace.prompt_length - 1),
            num_draft_tokens=K,
        )
        for step in range(1, K + 1):  # one block of rows: a pass is a step
            now["step"] = step
            next(passes)
    modules = {key.module for key in found}
    assert modules == set(draft.linears)
    assert {key.step for key in found} == {1, 2, 3}
    for key, one in found.items():
        seen = torch.cat([x.flatten(0, -2) for x in kept[key.module, key.step]])
        halves = dict(zip(("embedding", "hidden"), seen.chunk(2, dim=-1), strict=True))
        part = halves.get(key.half, seen)
        assert one.absmax == float(part.abs().max())
        assert one.count == part.numel()
    concat = {key.module for key in found if key.half != "whole"}
    assert concat == {f"layers.0.self_attn.{name}_proj" for name in "qkv"}


def test_folders_add_up_and_fused_linears_share(folder: Path) -> None:
    draft = load_draft(folder / "draft")
    parts = [
        measure_ranges(draft, TraceFolder.open(folder / name), num_draft_tokens=K)
        for name in ("traces", "others")
    ]
    total = merged(parts)
    key = RangeKey("layers.0.mlp.down_proj", 2, "whole")
    assert total[key].count == sum(part[key].count for part in parts)
    assert total[key].absmax == max(part[key].absmax for part in parts)
    by_module = of_modules(total)
    assert by_module["layers.0.mlp.gate_proj"] is by_module["layers.0.mlp.up_proj"]
    q = "layers.0.self_attn.q_proj"
    fused = [one for key, one in total.items() if key.half != "whole"]
    assert by_module[q].absmax == max(one.absmax for one in fused)


def test_continuations_that_are_too_short(folder: Path) -> None:
    draft, traces = load_draft(folder / "draft"), TraceFolder.open(folder / "traces")
    with pytest.raises(CalibrationError, match="no continuation is longer than 40 tokens"):
        measure_ranges(draft, traces, num_draft_tokens=40)
