"""A faked GPU under the code that `check --ask` runs beside an engine: loading without kernels."""

import dataclasses
import importlib
import os
import types
from pathlib import Path
from typing import Any


def install(engine: Any, arch: str) -> None:
    """Fake the GPU for the rest of the process; `engine` is inside.in_vllm or in_sglang."""
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # which imports without compiled parts
    if engine.NAME == "vllm":  # before 0.28 a wheel for CUDA finds no platform
        from vllm.platforms import cpu, current_platform

        current_platform.__class__ = cpu.CpuPlatform
    platform = importlib.import_module(f"{engine.NAME}_platform")
    platform.install(arch)
    make, engine.kind, engine.device = engine.subject, lambda: "cpu", lambda: f"faked {arch}"

    def subject(draft: Path, target: Path) -> Any:
        return dataclasses.replace(make(draft, target), needs_gpu=platform.needs_gpu)

    engine.subject = subject
    running: Any = importlib.import_module("inside.running")
    running.run_linears = lambda *_given: ([], {}, {})  # a stand-in of a kernel computes nothing
    if engine.NAME == "sglang":
        published = engine.published
        engine.published = lambda _device: published("cuda")
    else:
        from vllm.v1.attention.backends.mla.prefill import selector

        selector._auto_select_mla_prefill_backend = lambda *_: types.SimpleNamespace  # before 0.32
        engine.start = lambda _stack: None  # a group of processes is there already
