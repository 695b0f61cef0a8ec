"""What `draftquant check` says of the cases, beside what the engines did."""

from collections.abc import Iterable
from pathlib import Path

from asked_pairs import check_draft
from cases import NUM_TARGET_LAYERS
from draftquant.quantize.engines.contract import EngineCheck
from draftquant.recipes.errors import CheckpointError
from results import Outcome

_SERVED = ("LOADS", "LOADS BUT WRONG")


def predicted(folder: Path, outcome: Outcome) -> EngineCheck:
    """The answer of `draftquant check` on a draft folder, for the platform of the outcome."""
    asked = {key: outcome[key] for key in ("engine", "version", "arch", "tp")}
    return check_draft(folder, **asked, target_layers=NUM_TARGET_LAYERS)


def parameter_mismatches(outcome: Outcome, answer: EngineCheck) -> list[str]:
    """Parameters of linears that the engine built with other shapes than `check` says, or not.

    Only of drafts that are served as drafts: `check` shows no layers of a whole model. Weight-only
    NVFP4 has an input_scale besides, which is not stored and never read; a head that is not stored
    is the target's.
    """
    if outcome["verdict"] not in _SERVED or not answer.layers:
        return []
    said = {
        f"{layer.module}.{parameter.name}": list(parameter.shape)
        for layer in answer.layers
        for parameter in layer.parameters
    }
    built = {
        f"{module}.{name}": list(shape)
        for module, parameters in outcome["linears"].items()
        for name, shape in parameters.items()
    }
    unread = [name for name in built if name.endswith(".input_scale")]
    unread += ["lm_head.weight"] if "lm_head.weight" in built else []
    said = {name: built[name] for name in unread} | said
    return [
        f"{_where(answer)}, {outcome['draft']}: {name} is {said.get(name)} in check,"
        f" {built.get(name)} in the engine"
        for name in sorted(said.keys() | built.keys())
        if said.get(name) != built.get(name)
    ]


def capture_mismatches(outcome: Outcome, answer: EngineCheck) -> list[str]:
    """Layers of the target that the engine captures, and `check` does not say."""
    executed = list(outcome.get("captures", {}).values())
    said = [None if each.inputs is None else list(each.inputs) for each in answer.captures]
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
        mismatches += parameter_mismatches(outcome, answer)
        mismatches += capture_mismatches(outcome, answer)
    return mismatches


def _where(answer: EngineCheck) -> str:
    return f"{answer.engine} {answer.version} on {answer.arch}, tp {answer.tp}"
