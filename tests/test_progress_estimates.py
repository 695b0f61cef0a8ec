"""The time that is left, estimated over real traces: by a clock that counts what is computed.

The clock is as long as every product's multiplications take, and a fixed time for each operation
that a machine needs to begin it. So the same run gives the same times on every machine.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftquant import api as dq
from draftquant.calibration.prompts.prompt_file import Prompt, read_prompts
from draftquant.quantize.making import execute
from draftquant.scripts.frame import progress
from draftquant.scripts.frame.console import OnTerminal
from draftquant.scripts.frame.streams import speak
from recorded import record_traces
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.slow
PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
LAYERS = (0, 1, 2)
PER_SECOND = 1e8
TO_BEGIN = 2e-3
"""Seconds of an operation, whatever its size: a CPU of 20 GFLOP/s and 10 us, 200 times slower."""
_PRODUCTS = {"linear": 0, "matmul": 0, "mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1}
"""Operation -> which of its arguments has as many columns as products are summed."""


class Clock(TorchDispatchMode):
    """The time of what is computed, in all threads one after the other."""

    now = 0.0
    _lock = threading.Lock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        products = 0.0
        if name in _PRODUCTS:
            products = out.numel() * args[_PRODUCTS[name]].shape[-1]
        elif "cholesky" in name:
            products = args[0].shape[-1] ** 3
        with Clock._lock:
            Clock.now += TO_BEGIN + products / PER_SECOND
        return out


class Seen:
    """Every estimate of every phase: when it was made, and when the phase was over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: dict[str, list[tuple[float, float]]] = {}
        self.begun: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        show, end = progress.Bar._show, progress.Bar.end

        def shown(bar: progress.Bar) -> None:
            if bar.now.left is not None:
                own = self.made.setdefault(bar.now.label, [])
                own.append((Clock.now, bar.now.left))
            self.begun.setdefault(bar.now.label, bar.now.since)
            show(bar)

        def ended(bar: progress.Bar) -> None:
            self.ended[bar.now.label] = Clock.now
            end(bar)

        monkeypatch.setattr(progress.Bar, "_show", shown)
        monkeypatch.setattr(progress.Bar, "end", ended)

    def wrong_by(self, label: str) -> list[float]:
        """Factors of the estimates behind the first tenth of a phase and before the last."""
        start, end = self.begun[label], self.ended[label]
        whole = end - start
        return [
            left / (end - now)
            for now, left in self.made[label]
            if now - start >= whole / 10 and end - now >= whole / 10
        ]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    speak(quiet=False, verbose=False)
    Clock.now = 0.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: Clock.now)
    step = execute._Execution._step

    def timed(*args: Any) -> None:  # in the threads that quantize
        with Clock():
            step(*args)

    monkeypatch.setattr(execute._Execution, "_step", timed)
    return Seen(monkeypatch)


def uneven_prompts() -> list[Prompt]:
    """Of 8 to 160 tokens, the long ones rare, as people write them."""
    text = [token for p in read_prompts(PAIR / "prompts.jsonl") for token in p.token_ids]
    lengths = [8 + round(152 * (i / 15) ** 3) for i in range(16)]
    return [
        Prompt(id=f"p{i}", category="all", token_ids=tuple(text[i * 20 : i * 20 + length]))
        for i, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("estimates") / "traces"
    record_traces(
        PAIR / "target", uneven_prompts(), out,
        max_new_tokens=12, batch_size=4, aux_layer_ids=LAYERS,
    )  # fmt: skip
    return out


def held(seen: Seen, label: str, at_least: int) -> None:
    wrong = seen.wrong_by(label)
    assert len(wrong) >= at_least
    assert 0.5 <= min(wrong) <= max(wrong) <= 2, wrong


def shown(run: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with Clock():
        run(*args, listener=OnTerminal(), **kwargs)


def test_replay(seen: Seen, traces: Path) -> None:
    drafts = [PAIR / "draft", PAIR / "draft"]
    shown(dq.replay, drafts, traces, num_draft_tokens=3, batch_size=3)
    held(seen, "replay", 2)


def test_quantize_by_gptq(seen: Seen, traces: Path, tmp_path: Path) -> None:
    shown(
        dq.quantize, PAIR / "draft", "int4-channel-gptq", tmp_path / "out", traces=traces,
        num_draft_tokens=3,
    )  # fmt: skip
    held(seen, "measure the linears' inputs", 10)
    held(seen, "quantize", 2)
