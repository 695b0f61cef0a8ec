"""What `draftquant check` says of the cases, beside what the engines did."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from cases import NUM_TARGET_LAYERS
from draftquant.quantize.engines import check_draft

Verdict = Literal["LOADS", "LOADS BUT WRONG", "REFUSED", "UNKNOWN"]


def predicted(folder: Path, engine: str, arch: str, tp: int) -> Verdict:
    """The verdict of `draftquant check` on a draft folder.

    Args:
        folder: a draft.
        engine: "vllm" or "sglang".
        arch: "sm90", "sm100" or "gfx942".
        tp: number of tensor-parallel shards.
    """
    answer = check_draft(folder, engine=engine, arch=arch, tp=tp, target_layers=NUM_TARGET_LAYERS)
    verdict: Verdict = answer.verdict
    return verdict


def find_mismatches(folders: Path, outcomes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Every prediction that is not what the engine did.

    What the fakes could not tell (UNKNOWN) refutes no prediction. `check` may not say UNKNOWN
    where the engine gave an answer: that would be a hole in it.
    """
    mismatches = []
    for outcome in outcomes:
        place = (outcome["engine"], outcome["arch"], outcome["tp"])
        said = predicted(folders / outcome["draft"], *place)
        if outcome["verdict"] not in ("UNKNOWN", said):
            engine, arch, tp = place
            mismatches.append(
                f"{outcome['draft']} on {engine} {arch}, tp {tp}: check says {said},"
                f" the engine {outcome['verdict']} {outcome['error'] or ''}".rstrip()
            )
    return mismatches
