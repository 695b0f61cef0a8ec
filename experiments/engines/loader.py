"""The command line of both loaders: one JSON object per draft on standard output."""

import argparse
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

_QUANTIZE = Path(__file__).resolve().parents[2] / "quantize"
sys.path.append(str(_QUANTIZE / "asking"))  # draftquant is not installed beside an engine

from inside.answer import text_of  # noqa: E402
from inside.loaded_model import FolderTensors, Outcome, Subject, examine  # noqa: E402

_LAYER = Path("/layer")
_FIRST_OF_LAYER = re.compile(
    r"(model\.layers\.\d+|model\.mtp_layers\.\d+|mtp)\.(eh_proj|input_proj|fc)\.weight"
)
_TABLES = re.compile(r"(embed_tokens|shared_head\.head)\.weight$")
Line = dict[str, Any]


class Loaded(NamedTuple):
    """One shard of a draft in an engine, and what else is asked of it.

    Attributes:
        captures: runner -> layers of the target that it captures; None = its default.
    """

    subject: Subject
    captures: Callable[[], dict[str, list[int] | None]] = dict


Make = Callable[[Path, Path, int, int], Loaded]
"""(draft, target, tp, rank) -> one shard of the draft."""


def run(name: str, platform: Any, loaded: Make, of_layer: Make) -> None:
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
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are tiny; and processes are forked
    platform.install(arguments.arch)
    make = of_layer if arguments.target == _LAYER else loaded
    for draft in arguments.drafts:
        target = arguments.target or draft.parent / "target"
        called = draft.name if arguments.target else f"{draft.parent.name}/{draft.name}"
        line = {"draft": called, "engine": name, "version": version(name)}
        line |= {"arch": arguments.arch, "tp": arguments.tp}
        sys.stdout.flush()
        if os.fork() == 0:  # engines cache configs and change classes: each draft starts afresh
            print(json.dumps(_answer(partial(make, draft, target, arguments.tp), platform, line)))
            sys.stdout.flush()
            os._exit(0)
        _, status = os.wait()
        if status:
            raise RuntimeError(f"{name} on {draft.name} ended with status {status}")


def tensors_of_layer(folder: Path) -> set[str]:
    """Those of a target's MTP layer; its tables are the target's."""
    tensors = FolderTensors(folder)
    starts = tuple(f"{m[1]}." for name in tensors if (m := _FIRST_OF_LAYER.fullmatch(name)))
    return {name for name in tensors if name.startswith(starts) and not _TABLES.search(name)}


def _answer(of_rank: Callable[[int], Loaded], platform: Any, line: Line) -> Line:
    """What both ranks say; the first one that does not load decides. Those between are alike."""
    line |= {"verdict": "REFUSED", "error": None, "parameters": {}, "captures": {}}
    outcome = Outcome()
    try:
        for rank in dict.fromkeys((0, line["tp"] - 1)):
            outcome = Outcome(stage="config")
            loaded = of_rank(rank)
            with loaded.subject.context:
                _examine(loaded, outcome, line)
            outcome.stage = "loaded"
            line["captures"] = loaded.captures()
            wrong = outcome.is_incomplete or outcome.merged
            line["verdict"] = "LOADS BUT WRONG" if wrong else "LOADS"
            if wrong:
                break
    except Exception as exc:  # noqa: BLE001  whatever an engine raises is its answer
        # A kernel that was called too early is the fake's limit, not the engine's answer.
        line["verdict"] = "UNKNOWN" if platform.needs_gpu(exc) else "REFUSED"
        line["error"] = text_of(exc, line["engine"]).replace(str(of_rank.args[0]), "DRAFT")  # type: ignore[attr-defined]
        traceback.print_exception(exc, file=sys.stderr)
    return {**line, **{key: value for key, value in asdict(outcome).items() if key != "filled"}}


def _examine(loaded: Loaded, outcome: Outcome, line: Line) -> None:
    subject = loaded.subject

    def build() -> nn.Module:
        model = subject.build()
        line["parameters"] = describe_parameters(model)
        return model

    examine(replace(subject, build=build), outcome)


def describe_parameters(model: nn.Module) -> Mapping[str, str]:
    """Name -> dtype and shape of every parameter that loading fills."""
    return {
        name: f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"
        for name, parameter in model.named_parameters()
    }
