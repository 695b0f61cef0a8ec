"""What `draftquant check` says of the cases, beside what the engines did."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cases import NUM_TARGET_LAYERS
from draftquant.quantize.engines import EngineCheck, check_draft


def predicted(folder: Path, engine: str, arch: str, tp: int) -> EngineCheck:
    """The answer of `draftquant check` on a draft folder.

    Args:
        folder: a draft.
        engine: "vllm" or "sglang".
        arch: "sm90", "sm100" or "gfx942".
        tp: number of tensor-parallel shards.
    """
    return check_draft(folder, engine=engine, arch=arch, tp=tp, target_layers=NUM_TARGET_LAYERS)


def parameter_mismatches(answer: EngineCheck, built: Mapping[str, str]) -> list[str]:
    """Parameters of linears that the engine builds with other shapes than `check` says, or not.

    Weight-only NVFP4 has an input_scale besides, which is not stored and never read.

    Args:
        answer: on a draft that loads.
        built: the engine's, name -> dtype and shape.
    """
    said = {
        f"{layer.module}.{parameter.name}": list(parameter.shape)
        for layer in answer.layers
        for parameter in layer.parameters
    }
    modules = {layer.module for layer in answer.layers}
    found = {
        name: json.loads(form.split(" ", 1)[1])
        for name, form in built.items()
        if name.rpartition(".")[0] in modules
    }
    return [
        f"{name}: check says {said.get(name)}, the engine {found.get(name)}"
        for name in sorted(said.keys() | found.keys())
        if said.get(name) != found.get(name)
        and not (name not in said and name.endswith(".input_scale"))
    ]


def find_mismatches(folders: Path, outcomes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Every prediction that is not what the engine did.

    What the fakes could not tell (UNKNOWN) refutes no prediction. `check` may not say UNKNOWN
    where the engine gave an answer: that would be a hole in it.
    """
    mismatches = []
    for outcome in outcomes:
        place = (outcome["engine"], outcome["arch"], outcome["tp"])
        answer = predicted(folders / outcome["draft"], *place)
        where = f"{outcome['draft']} on {place[0]} {place[1]}, tp {place[2]}"
        if outcome["verdict"] not in ("UNKNOWN", answer.verdict):
            mismatches.append(
                f"{where}: check says {answer.verdict},"
                f" the engine {outcome['verdict']} {outcome['error'] or ''}".rstrip()
            )
        elif outcome["verdict"] == "LOADS":
            wrong = parameter_mismatches(answer, outcome["parameters"])
            mismatches += [f"{where}: {one}" for one in wrong]
    return mismatches
