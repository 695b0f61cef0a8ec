"""A faked GPU under the code that `check --ask` runs beside an engine: loading without kernels."""

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def install(engine: Any, arch: str) -> None:
    """Fake the GPU for the rest of the process; `engine` is inside.in_vllm or in_sglang."""
    platform = importlib.import_module(f"{engine.NAME}_platform")
    platform.install(arch)

    def start(_stack: object) -> None:
        if engine.NAME == "sglang":
            platform.publish_server_arguments(1)
        platform.become_rank(1, 0)

    make: Callable[[Path, Path], Any] = engine.subject

    def subject(draft: Path, target: Path) -> Any:
        return dataclasses.replace(make(draft, target), needs_gpu=platform.needs_gpu)

    engine.start, engine.subject = start, subject
    engine.kind, engine.device = lambda: "cpu", lambda: f"faked {arch}"
