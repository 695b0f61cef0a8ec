"""The command line of both loaders: one JSON object per draft on standard output."""

import argparse
import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from verdict import Outcome, Subject, examine, read_tensors

_PLUGINS = Path(__file__).resolve().parents[2] / "quantize" / "plugins"
_TAIL = re.compile(
    r" The available parameters| Weight config:|: dict_keys| Must be one of|, weight_quant="
)
"""Where errors begin to list what they know; some in another order each time."""
_LAYER = Path("/layer")
_FIRST_OF_LAYER = re.compile(
    r"(model\.layers\.\d+|model\.mtp_layers\.\d+|mtp)\.(eh_proj|input_proj|fc)\.weight"
)
_TABLES = re.compile(r"(embed_tokens|shared_head\.head)\.weight$")


Make = Callable[[Path, Path, int, int], Subject]
"""(draft, target, tp, rank) -> one shard of the draft."""


def run(name: str, platform: Any, subject: Make, of_layer: Make) -> None:
    """Read the arguments and load one draft after the other.

    Args:
        name: of the engine. platform: the module that fakes its GPUs.
        of_layer: of the MTP layer inside a target, which is the folder.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("drafts", nargs="+", type=Path)
    parser.add_argument("--target", type=Path, help="one for all drafts; /layer: of_layer")
    parser.add_argument("--arch", choices=platform.ARCHS, required=True)
    parser.add_argument("--tp", type=int, default=1, help="number of tensor-parallel shards")
    parser.add_argument("--plugin", action="store_true", help="with draftquant's plugin")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are tiny; and processes are forked
    platform.install(arguments.arch)
    if arguments.plugin:  # draftquant is not installed here, and the plugin needs nothing of it
        sys.path.append(str(_PLUGINS.parent))
        importlib.import_module(f"{_PLUGINS.name}.{name}").register()
    make = of_layer if arguments.target == _LAYER else subject
    for draft in arguments.drafts:
        target = arguments.target or draft.parent / "target"
        outcome = Outcome(
            draft=draft.name if arguments.target else f"{draft.parent.name}/{draft.name}",
            engine=name,
            version=version(name),
            arch=arguments.arch,
            tp=arguments.tp,
        )
        sys.stdout.flush()
        if os.fork() == 0:  # engines cache configs and change classes: each draft starts afresh
            _load_ranks(partial(make, draft, target, arguments.tp), platform, outcome, str(draft))
            print(json.dumps(asdict(outcome)), flush=True)
            os._exit(0)
        _, status = os.wait()
        if status:
            raise RuntimeError(f"{name} on {draft.name} ended with status {status}")


def tensors_of_layer(folder: Path) -> dict[str, torch.Tensor]:
    """Those of a target's MTP layer; its tables are the target's."""
    tensors = read_tensors(folder)
    starts = tuple(f"{m[1]}." for name in tensors if (m := _FIRST_OF_LAYER.fullmatch(name)))
    own = (name for name in tensors if name.startswith(starts) and not _TABLES.search(name))
    return {name: tensors[name] for name in own}


def _load_ranks(
    of_rank: Callable[[int], Subject], platform: Any, outcome: Outcome, draft: str
) -> None:
    """The first rank that does not load decides; those between the first and the last are alike."""
    try:
        for rank in dict.fromkeys((0, outcome.tp - 1)):
            outcome.stage = "config"
            subject = of_rank(rank)
            with subject.context:
                examine(subject, outcome)
            if outcome.verdict != "LOADS":
                break
    except Exception as exc:  # noqa: BLE001  whatever an engine raises is its answer
        # A kernel that was called too early is the fake's limit, not the engine's answer.
        outcome.verdict = "UNKNOWN" if platform.needs_gpu(exc) else "REFUSED"
        outcome.error = _text(exc).replace(draft, "DRAFT")
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
