"""What `draftquant check` says of the cases, beside what the engines did."""

from collections.abc import Iterable
from pathlib import Path

from asked_pairs import check_draft
from cases import NUM_TARGET_LAYERS
from draftquant.quantize.engines.contract import EngineCheck
from draftquant.recipes.errors import CheckpointError
from results import Outcome

_SERVED = ("LOADS", "LOADS BUT WRONG")
_OF_FLOATS = {"weight", "bias"}
"""Parameters of a linear that is not quantized."""


def predicted(folder: Path, outcome: Outcome) -> EngineCheck:
    """The answer of `draftquant check` on a draft folder, for the platform of the outcome."""
    asked = {key: outcome[key] for key in ("engine", "version", "arch", "tp")}
    return check_draft(folder, **asked, target_layers=NUM_TARGET_LAYERS)


def linear_mismatches(outcome: Outcome, answer: EngineCheck) -> list[str]:
    """Linears that the engine built, or took as quantized, and `check` does not, or otherwise.

    Only of drafts that are served as drafts: `check` shows no linears of a whole model. A head that
    is not stored is the target's.
    """
    if outcome["verdict"] not in _SERVED or not answer.linears:
        return []
    said = {name: taken is not None for name, taken in answer.linears.items()}
    built = {name: bool({*each} - _OF_FLOATS) for name, each in outcome["linears"].items()}
    absent = {"lm_head"} - said.keys()
    return [
        f"{_where(answer)}, {outcome['draft']}: {name}: quantized {said.get(name)} in check,"
        f" {built.get(name)} in the engine"
        for name in sorted((said.keys() | built.keys()) - absent)
        if said.get(name) != built.get(name)
    ]


def capture_mismatches(outcome: Outcome, answer: EngineCheck) -> list[str]:
    """Layers of the target that the engine's default runner captures, and `check` does not say."""
    executed = next(iter(outcome.get("captures", {}).values()), None)
    said = None if answer.captures is None else list(answer.captures)
    if outcome["verdict"] not in _SERVED or executed == said:
        return []
    return [f"{_where(answer)}, {outcome['draft']}: captures {said} in check, {executed}"]


def find_mismatches(folders: Path, outcomes: Iterable[Outcome]) -> list[str]:
    """Every prediction that is not what the engine did.

    What the fakes could not tell (UNKNOWN) refutes no prediction. `check` may not say UNKNOWN
    where the engine gave an answer: that would be a hole in it.
    """
    mismatches = []
    for outcome in outcomes:
        try:
            answer = predicted(folders / outcome["draft"], outcome)
        except CheckpointError as exc:  # it is not read as a draft: no engine may serve it well
            if outcome["verdict"] == "LOADS":
                mismatches.append(f"{outcome['draft']} loads, and is not read: {exc.what}")
            continue
        if outcome["verdict"] not in ("UNKNOWN", answer.verdict):
            mismatches.append(
                f"{_where(answer)}, {outcome['draft']}: check says {answer.verdict},"
                f" the engine {outcome['verdict']} {outcome['error'] or ''}".rstrip()
            )
        mismatches += linear_mismatches(outcome, answer)
        mismatches += capture_mismatches(outcome, answer)
    return mismatches


def _where(answer: EngineCheck) -> str:
    return f"{answer.engine} {answer.version} on {answer.arch}, tp {answer.tp}"
