"""A faked GPU under the code that `check --ask` runs beside an engine: loading without kernels."""

import dataclasses
import importlib
import os
from pathlib import Path
from typing import Any


def install(engine: Any, arch: str) -> None:
    """Fake the GPU for the rest of the process; `engine` is inside.in_vllm or in_sglang."""
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # which imports without compiled parts
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
        engine.start = lambda _stack: None  # a group of processes is there already
