"""What `draftquant check` says of the cases, beside what the engines did."""

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["LOADS", "LOADS BUT WRONG", "REFUSED", "UNKNOWN"]


def predicted(folder: Path, engine: str, arch: str, tp: int) -> Verdict:
    """The verdict of `draftquant check` on a draft folder.

    Args:
        folder: a draft.
        engine: "vllm" or "sglang".
        arch: "sm90", "sm100" or "gfx942".
        tp: number of tensor-parallel shards.
    """
    from draftquant.quantize.engines import check_draft

    verdict: Verdict = check_draft(folder, engine=engine, arch=arch, tp=tp).verdict
    return verdict


def find_mismatches(folders: Path, outcomes: Iterable[Mapping[str, Any]]) -> list[str] | None:
    """Every prediction that is not what the engine did; None as long as there is no `check`.

    What the fakes could not tell (UNKNOWN) refutes no prediction. `check` may not say UNKNOWN
    where the engine gave an answer: that would be a hole in it.
    """
    if importlib.util.find_spec("draftquant.quantize.engines") is None:
        return None
    return [
        f"{outcome['draft']} on {outcome['engine']} {outcome['arch']}, tp {outcome['tp']}:"
        f" check says {said}, the engine {outcome['verdict']} {outcome['error'] or ''}".rstrip()
        for outcome in outcomes
        if outcome["verdict"] != "UNKNOWN"
        and (
            said := predicted(
                folders / outcome["draft"], outcome["engine"], outcome["arch"], outcome["tp"]
            )
        )
        != outcome["verdict"]
    ]
