"""Devices by name, their memory, and that nothing of a replay or of learning is made elsewhere.

Tensors of torch's device "meta" stand for those of a GPU. They have no values: to read one, for
which a GPU would wait, or to mix them with tensors of the CPU is an error.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from draftquant.calibration.passes import devices, draft_inputs
from draftquant.calibration.passes import proposals as counted_rows
from draftquant.calibration.passes.devices import available_bytes, resolve_device
from draftquant.calibration.passes.draft_inputs import proposals_of_batch
from draftquant.calibration.traces.prompt_trace import PromptTrace
from draftquant.quantize.algorithms import InputMoments
from draftquant.quantize.algorithms.algorithm import Feedback
from draftquant.quantize.backends import get_backend
from draftquant.quantize.layouts import get_layout
from draftquant.quantize.layouts.layout import GatheredColumns
from draftquant.quantize.numerics.number_formats import _values_on
from draftquant.recipes import Algorithm, load_recipe
from draftquant.recipes.errors import DeviceError
from test_passes import K, case_of, rounding
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

CPU = torch.device("cpu")
META = torch.device("meta")


@pytest.fixture(autouse=True)
def no_table_of_the_meta_device() -> Iterator[None]:
    yield
    _values_on.cache_clear()


# ---- by name, and their memory


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("", "gpu", "cuda:x", "cuda:-1", "cpu:0"):
        with pytest.raises(DeviceError, match=r"--device: expected auto, cpu, cuda or cuda:I"):
            resolve_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    with pytest.raises(DeviceError, match=r"there is no cuda:0: torch .* sees the CPU only"):
        resolve_device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"H{i}00")
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda:0")
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    assert resolve_device("cpu") == CPU
    with pytest.raises(DeviceError, match=r"torch sees cpu, cuda:0 \(H000\), cuda:1 \(H100\)"):
        resolve_device("cuda:2")


def test_memory_of_machine_and_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo, group = tmp_path / "meminfo", tmp_path / "group"
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:    5000 kB\n", encoding="utf-8")
    monkeypatch.setattr(devices, "_MEMINFO", meminfo)
    monkeypatch.setattr(devices, "_CGROUPS", ((group, "memory.max", "memory.current", ""),))
    assert available_bytes(CPU) == 5000 * 1024
    group.mkdir()
    (group / "memory.current").write_text("3000000\n", encoding="utf-8")
    stat = "anon 7\nactive_file 1000\ninactive_file 200\n"
    (group / "memory.stat").write_text(stat, encoding="utf-8")
    # The last one is a limit that was lowered while more was in use.
    for most, left in (("max", 5000 * 1024), ("4000000", 1_000_000 + 1200), ("2000000", 0)):
        (group / "memory.max").write_text(f"{most}\n", encoding="utf-8")
        assert available_bytes(CPU) == left
    meminfo.unlink()
    assert available_bytes(CPU) is None
    assert devices.peak_bytes(CPU) > 2**24


# ---- a replay


@pytest.fixture
def _no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks at values, which fake tensors have none of: every other row goes on."""
    monkeypatch.setattr("draftquant.quantize.drafts.forward.finite", lambda values, *_: values)
    monkeypatch.setattr(draft_inputs, "_check_embedded", lambda *_: None)
    monkeypatch.setattr(counted_rows, "_read", lambda flags: np.arange(len(flags)) % 3 < 2)


@pytest.mark.slow
@pytest.mark.usefixtures("_no_values")
@pytest.mark.parametrize(
    ("draft", "activations"),
    # Fake tensors cannot make the table of FP4 values; test_passes holds that one.
    [("llama", "none"), ("mla", "token-dynamic"), ("dflash", "tensor-static")],
)
def test_a_replay_computes_where_the_draft_is(draft: str, activations: Any) -> None:
    case, seen = case_of(draft), set[torch.device]()
    narrow = {n: w.bfloat16() if w.is_floating_point() else w for n, w in case.weights.items()}
    ids, wide = case.token_ids, case.features
    # two prompts of different lengths on the CPU, as a trace folder gives them
    read = [(ids[i, : n + 1], wide[i, :n], ids[i, 1 : n + 1]) for i, n in enumerate((12, 9))]

    with FakeTensorMode() as mode:
        rounded = rounding(activations, case)
        rounded._scales = {n: s if s is None else s.to(META) for n, s in rounded._scales.items()}

        def observe(name: str, x: Tensor) -> Tensor:
            seen.add(x.device)
            return rounded(name, x)

        weights = {name: mode.from_tensor(w).to(META) for name, w in narrow.items()}
        placed: Any = SimpleNamespace(
            name="fake", family=case.family, geometry=case.geometry, weights=weights,
            quantized=(), linears=(), activations={}, rounds_alone=True,
            forward=case.family.forward(case.geometry, weights, observe),
            fusion_sha256="", dtype=torch.float32, device=META,
        )  # fmt: skip
        batch = [
            PromptTrace(
                id="", category="", prompt_length=2 + i, token_ids=a, features=b, target_top1=c
            )
            for i, (a, b, c) in enumerate([map(mode.from_tensor, parts) for parts in read])
        ]
        manifest = SimpleNamespace(features=SimpleNamespace(kind="aux"))
        traces: Any = SimpleNamespace(manifest=manifest)
        found = proposals_of_batch(placed, traces, batch, num_draft_tokens=K)
        shapes = [(tuple(one.token_ids.shape), one.token_ids.device) for one in found]
        assert seen == {META}
        # N - 1 - K - (P - 1) rows of N = 13 and 10 tokens, with the results back on the CPU.
        assert shapes == [((8, K), CPU), ((4, K), CPU)]
        weights["fc.weight"] = weights["fc.weight"].cpu()
        with pytest.raises(RuntimeError, match=r"same device, but found .* meta and cpu"):
            proposals_of_batch(placed, traces, batch, num_draft_tokens=K)


# ---- quantizing and learning


def moments() -> InputMoments:
    """Whose factor, for which the host does wait, is there."""
    square = torch.empty(128, 128, device=META)
    found = InputMoments(square, META)
    order = torch.empty(128, dtype=torch.int64, device=META)
    found._feedback = Feedback(order=order, factor=square)
    return found


@pytest.mark.parametrize(
    ("scale", "rounding", "recipes"),
    [
        ("absmax", "nearest", ("int4-channel", "mi325x-w4a8", "blackwell-nvfp4", "mxfp4-weights",
                               "blackwell-fp8", "mi325x-int4-awq")),
        pytest.param(
            "absmax", "gptq", ("int4-channel", "blackwell-nvfp4"), marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_codes_are_made_at_the_weight(scale: Any, rounding: Any, recipes: tuple[str, ...]) -> None:
    backend = get_backend("torch", Algorithm(scale=scale, rounding=rounding))
    weight = torch.empty(128, 128, dtype=torch.bfloat16, device=META)
    for recipe in map(load_recipe, recipes):
        absmax = torch.empty(1, 1, device=META) if recipe.weights.scales_whole_matrix else None
        needed = moments() if backend.needs == "second_moments" else None
        block = backend.quantize(weight, recipe.weights, absmax, needed)
        for data in get_layout(recipe.layout).encode_rows("a", block, recipe.weights).values():
            assert (data.tensor if isinstance(data, GatheredColumns) else data).device == META
