"""Devices by name, their memory, and that no tensor of a replay is made elsewhere.

Where no GPU is at hand, fake tensors on the device "meta" stand for one: torch refuses to mix them
with those of the CPU, as it does with a GPU's. (A fake "cuda" cannot be sliced without CUDA.)
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftquant.calibration.passes import draft_inputs
from draftquant.calibration.passes import memory as devices
from draftquant.calibration.passes import proposals as counted_rows
from draftquant.calibration.passes.draft_inputs import proposals_of_batch
from draftquant.calibration.passes.memory import available_bytes, resolve_device
from draftquant.calibration.traces.prompt_trace import PromptTrace
from draftquant.quantize.stored.loading import LoadedDraft
from draftquant.recipes.errors import DeviceError
from test_passes import ACTIVATIONS, DRAFTS, K, case_of, rounding
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
GPU = torch.device("cuda", 1)
OTHER = torch.device("meta")


# ---- by name


def test_without_a_gpu_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    for name in ("cuda", "cuda:0"):
        with pytest.raises(DeviceError, match=f"there is no {name}: torch .* sees the CPU only"):
            resolve_device(name)


@pytest.fixture
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"H{i}00")


@pytest.mark.usefixtures("_two_gpus")
def test_with_gpus_auto_is_the_first() -> None:
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda:0")
    assert resolve_device("cuda:1") == GPU
    assert resolve_device("cpu") == CPU
    with pytest.raises(DeviceError) as caught:
        resolve_device("cuda:2")
    assert "torch sees cpu, cuda:0 (H000), cuda:1 (H100)" in str(caught.value)
    assert "fix: give one of these, or auto" in str(caught.value)


def test_other_names_are_none() -> None:
    for name in ("", "gpu", "cuda:x", "cuda:-1", "cuda1", "cpu:0"):
        with pytest.raises(DeviceError, match=r"--device: expected auto, cpu, cuda or cuda:I"):
            resolve_device(name)


# ---- memory


def test_memory_is_that_of_the_machine_and_of_its_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:    5000 kB\n", encoding="utf-8")
    monkeypatch.setattr(devices, "_MEMINFO", meminfo)
    group = tmp_path / "group"
    monkeypatch.setattr(devices, "_CGROUPS", ((group, "memory.max", "memory.current", ""),))
    assert available_bytes(CPU) == 5000 * 1024
    group.mkdir()
    (group / "memory.max").write_text("max\n", encoding="utf-8")
    (group / "memory.current").write_text("3000000\n", encoding="utf-8")
    (group / "memory.stat").write_text(
        "anon 7\nactive_file 1000\ninactive_file 200\n", encoding="utf-8"
    )
    assert available_bytes(CPU) == 5000 * 1024
    (group / "memory.max").write_text("4000000\n", encoding="utf-8")
    assert available_bytes(CPU) == 1_000_000 + 1200
    (group / "memory.max").write_text(
        "2000000\n", encoding="utf-8"
    )  # lowered while more was in use
    assert available_bytes(CPU) == 0
    meminfo.unlink()
    assert available_bytes(CPU) is None


# ---- a replay on a device that is not the CPU


@pytest.fixture
def _no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks at values, which fake tensors have none of: every other row goes on."""
    for module in ("quantize.drafts.forward",):
        monkeypatch.setattr(f"draftquant.{module}.finite", lambda values, *_: values)
    monkeypatch.setattr(draft_inputs, "_check_embedded", lambda *_: None)
    monkeypatch.setattr(counted_rows, "_read", lambda flags: np.arange(len(flags)) % 3 < 2)


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as mode:
        yield mode


def on_other(case: Any, on_input: Any, mode: FakeTensorMode) -> LoadedDraft:
    weights = {name: mode.from_tensor(w).to(OTHER) for name, w in case.weights.items()}
    return LoadedDraft(
        name="fake",
        family=case.family,
        geometry=case.geometry,
        weights=weights,
        quantized=(),
        linears=(),
        activations={},
        forward=case.family.forward(case.geometry, weights, on_input),
        fusion_sha256="",
        dtype=torch.float32,
        device=OTHER,
    )


def traces_of(case: Any, mode: FakeTensorMode) -> tuple[Any, list[PromptTrace]]:
    """Two prompts of different lengths on the CPU, as a trace folder gives them."""
    tokens, features = mode.from_tensor(case.token_ids), mode.from_tensor(case.features)
    batch = [
        PromptTrace(
            id=f"p{i}",
            category="",
            prompt_length=2 + i,
            token_ids=tokens[i, : count + 1],
            features=features[i, :count],
            target_top1=tokens[i, 1 : count + 1],
        )
        for i, count in enumerate((12, 9))
    ]

    class Traces:
        class manifest:  # noqa: N801 - an attribute
            class features:  # noqa: N801
                kind = "aux"

    return Traces, batch


@pytest.mark.each_value
@pytest.mark.usefixtures("_no_values")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("draft", "activations"),
    # Fake tensors cannot make the table of FP4 values; test_passes holds that one.
    [
        *((draft, "none") for draft in DRAFTS),
        *(("llama", kind) for kind in ACTIVATIONS[1:] if "fp4" not in kind),
    ],
)
def test_a_replay_computes_where_the_draft_is(
    draft: str, activations: Any, dtype: torch.dtype
) -> None:
    case, seen = case_of(draft), set[torch.device]()
    narrow = {n: w.to(dtype) if w.is_floating_point() else w for n, w in case.weights.items()}
    case = dataclasses.replace(case, weights=narrow)

    with FakeTensorMode() as mode:
        rounded = rounding(activations, case)
        rounded._scales = {
            name: None if scale is None else scale.to(OTHER)
            for name, scale in rounded._scales.items()
        }

        def observe(name: str, x: Tensor) -> Tensor:
            seen.add(x.device)
            return rounded(name, x)

        traces, batch = traces_of(case, mode)
        found = proposals_of_batch(on_other(case, observe, mode), traces, batch, num_draft_tokens=K)
        shapes = [(tuple(one.token_ids.shape), one.token_ids.device) for one in found]
    assert seen == {OTHER}
    # N - 1 - K - (P - 1) rows of N = 13 and 10 tokens, with the results back on the CPU.
    assert shapes == [((8, K), CPU), ((4, K), CPU)]


@pytest.mark.usefixtures("_no_values")
def test_fake_tensors_refuse_what_a_gpu_would(fake: FakeTensorMode) -> None:
    case = case_of("llama")
    draft = on_other(case, lambda _name, x: x, fake)
    traces, batch = traces_of(case, fake)
    draft.weights["fc.weight"] = draft.weights["fc.weight"].cpu()  # type: ignore[index]
    with pytest.raises(RuntimeError, match=r"same device, but found .* meta and cpu"):
        proposals_of_batch(draft, traces, batch, num_draft_tokens=K)
