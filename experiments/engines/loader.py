"""The command line of both loaders: one JSON object per draft on standard output."""

import argparse
import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from verdict import Outcome, Subject, examine

_PLUGINS = Path(__file__).resolve().parents[2] / "quantize" / "plugins"
_TAIL = re.compile(
    r" The available parameters| Weight config:|: dict_keys| Must be one of|, weight_quant="
)
"""Where errors begin to list what they know; some in another order each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine that can be asked what it makes of a draft.

    Attributes:
        archs: GPUs that it can be faked on.
        install: fakes one of them for the rest of the process.
        subject: (draft, target, tp, rank) -> one shard of the draft.
        needs_gpu: tells the exception of a stand-in for a kernel from the engine's own.
    """

    name: str
    version: str
    archs: Sequence[str]
    install: Callable[[str], None]
    subject: Callable[[Path, Path, int, int], Subject]
    needs_gpu: Callable[[Exception], bool]


def run(name: str, platform: Any, subject: Callable[[Path, Path, int, int], Subject]) -> None:
    """The command line of a loader of such subjects, on GPUs that the module `platform` fakes."""
    main(
        Engine(
            name=name,
            version=version(name),
            archs=platform.ARCHS,
            install=platform.install,
            subject=subject,
            needs_gpu=platform.needs_gpu,
        )
    )


def main(engine: Engine) -> None:
    """Read the arguments and load one draft after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("drafts", nargs="+", type=Path)
    parser.add_argument("--target", type=Path, help="folder with a config.json; one for all drafts")
    parser.add_argument("--arch", choices=engine.archs, required=True)
    parser.add_argument("--tp", type=int, default=1, help="number of tensor-parallel shards")
    parser.add_argument("--plugin", action="store_true", help="with draftquant's plugin")
    parser.add_argument("--debug", action="store_true", help="tracebacks on standard error")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are tiny; and processes are forked
    engine.install(arguments.arch)
    if arguments.plugin:  # draftquant is not installed here, and the plugin needs nothing of it
        sys.path.append(str(_PLUGINS.parent))
        importlib.import_module(f"{_PLUGINS.name}.{engine.name}").register()
    for draft in arguments.drafts:
        target = arguments.target or draft.parent / "target"
        outcome = Outcome(
            draft=draft.name if arguments.target else f"{draft.parent.name}/{draft.name}",
            engine=engine.name,
            version=engine.version,
            arch=arguments.arch,
            tp=arguments.tp,
        )
        sys.stdout.flush()
        if os.fork() == 0:  # engines cache configs and change classes: each draft starts afresh
            _load_ranks(engine, draft, target, outcome, debug=arguments.debug)
            print(json.dumps(asdict(outcome)), flush=True)
            os._exit(0)
        _, status = os.wait()
        if status:
            raise RuntimeError(f"{engine.name} on {draft.name} ended with status {status}")


def _load_ranks(
    engine: Engine, draft: Path, target: Path, outcome: Outcome, *, debug: bool
) -> None:
    """The first rank that does not load decides; those between the first and the last are alike."""
    try:
        for rank in dict.fromkeys((0, outcome.tp - 1)):
            outcome.stage = "config"
            subject = engine.subject(draft, target, outcome.tp, rank)
            with subject.context:
                examine(subject, outcome)
            if outcome.verdict != "LOADS":
                break
    except Exception as exc:  # noqa: BLE001  whatever an engine raises is its answer
        # A kernel that was called too early is the fake's limit, not the engine's answer.
        outcome.verdict = "UNKNOWN" if engine.needs_gpu(exc) else "REFUSED"
        outcome.error = _text(exc).replace(str(draft), "DRAFT")
        if debug:
            print(f"--- {draft.name}", file=sys.stderr)
            traceback.print_exception(exc, file=sys.stderr)


def _text(exc: Exception) -> str:
    """The engine's own words, shortened; of a bare assertion, the line that failed."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    if not lines:
        frame = traceback.extract_tb(exc.__traceback__)[-1]
        module = re.sub(r".*/(vllm|sglang)/", r"\1/", frame.filename)
        lines = [f"{module}:{frame.lineno}: {frame.line}"]
    text = " ".join(lines[:3])
    return f"{type(exc).__name__}: {_TAIL.split(text)[0][:300]}"
