"""A matrix of servers, run: real processes that answer, die, hang and are killed."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from draftquant.quantize.errors import OutputError
from draftquant.validate.errors import MeasureError
from draftquant.validate.measure.launch import Cell, Folder, cells, launch_matrix
from draftquant.validate.measure.matrix import Matrix, Variant
from test_server_process import ENGINE, free_port, is_gone, wait_until


def matrix_of(*variants: Variant, command: str = "", **keys: int | tuple[int, ...]) -> Matrix:
    found = {
        "port": free_port(), "concurrencies": (1, 4), "repeats": 2,
        "start_seconds": 20, "stop_seconds": 5, **keys,
    }  # fmt: skip
    return Matrix(
        engine="vllm",
        target="target",
        prompts="prompts.jsonl",
        max_new_tokens=8,
        command=f"{sys.executable} {ENGINE} --port {{port}} {command}",
        variants=variants or VARIANTS,
        **found,  # type: ignore[arg-type]
    )


NONE = Variant(name="none")
BF16 = Variant(name="bf16", draft="/drafts/b", arguments="--draft {draft}")
VARIANTS = (NONE, BF16)


class Measuring:
    """Callbacks that note what is done, and ask the server who it is."""

    def __init__(self, matrix: Matrix, out: Path) -> None:
        self.matrix, self.folder = matrix, Folder(path=out)
        self.done: list[str] = []
        self.said: list[str] = []
        self.before: Callable[[Cell], None] = lambda cell: None

    async def ready(self, variant: Variant) -> None:
        self.done.append(f"ready {variant.name}")

    def measure(self, cell: Cell, path: Path) -> None:
        self.before(cell)
        with urllib.request.urlopen(f"{self.matrix.url}/who") as answer:
            path.write_bytes(answer.read())

    def run(self, **plan: str) -> None:
        launch_matrix(
            self.matrix,
            self.folder,
            plan=dict(plan),
            ready=self.ready,
            measure=self.measure,
            on_progress=self.said.append,
        )


@pytest.fixture(autouse=True)
def quick_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of these tests answers /who with 404."""

    def urlopen(url: str) -> object:
        try:
            return urllib.request.build_opener().open(url)
        except urllib.error.HTTPError as exc:
            return contextlib.closing(exc)

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
