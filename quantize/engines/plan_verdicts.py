"""Where the result of a plan will load; `plan` and `quantize` find this out before they write."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ...recipes import built_in_recipes, load_recipe
from ...recipes.brief import first_of
from ...recipes.errors import DraftQuantError
from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from ..gpus import ARCHITECTURES, GPUS, gpu_name
from ..layouts import get_layout
from ..planning.quantization_plan import Plan, make_plan
from .contract import TITLES, EngineCheck
from .engine_check import check_on_each
from .versions import ENGINES


def planned_verdicts(
    plan: Plan, *, arch: str | None = None, tp: int = 1, fix_config: bool = False
) -> tuple[EngineCheck, ...]:
    """What each known engine will do with the result on this GPU, or on each GPU of the engine.

    With `fix_config` the lints of the draft have corrected config.json, as `quantize_draft` does.
    """
    checkpoint = _planned_checkpoint(plan, fix_config=fix_config)
    side_files = get_layout(plan.recipe.layout).side_files(checkpoint.config["quantization_config"])
    return tuple(
        check
        for engine in ENGINES.values()
        for check in check_on_each(
            checkpoint,
            [each for each in engine.gpus if arch in (None, each)],
            engine=engine.name,
            tp=tp,
            target_layers=plan.target_layers,
            has_side_file=bool(side_files),
        )
    )


def _planned_checkpoint(plan: Plan, *, fix_config: bool) -> Checkpoint:
    """The folder that a plan would write, as its headers and config.json will be.

    Kept tensors are where they are in the source, so their values can be read; those
    of quantized linears have names, dtypes and shapes, but no bytes.
    """
    from ..lints.catalogue import fixed_config, output_changes  # numpy, for maps

    source = plan.draft.checkpoint
    kept = (step for step in plan.steps if step.action not in ("drop", "quantize"))
    tensors = {step.row.tensor.name: step.row.tensor for step in kept}
    for output in (*plan.quantized, *plan.cache):
        for part in output.stored:
            tensors[part.name] = TensorInfo(
                name=part.name,
                dtype=part.dtype,
                shape=part.shape,
                file=output.row.tensor.file,
                start=0,
                stop=part.nbytes,
            )
    changes = output_changes(plan.draft, plan.remaining, fix_config=fix_config)
    return replace(
        source,
        config={**fixed_config(source.config, changes), "quantization_config": plan.declared()},
        tensors=dict(sorted(tensors.items())),
        subtree=None,  # a folder of its own
    )


def verdict_lines(verdicts: Iterable[EngineCheck]) -> list[str]:
    """One line per engine: its verdict on each GPU."""
    by_engine: dict[str, list[str]] = {}
    for check in verdicts:
        where = gpu_name(check.arch)
        by_engine.setdefault(check.title, []).append(f"{where} {check.verdict}")
    return [f"{engine}: {', '.join(each)}" for engine, each in by_engine.items()]


def to_mapping(verdicts: Iterable[EngineCheck]) -> list[dict[str, str | None]]:
    """For JSON: engine, version, arch, verdict and the engine's error."""
    keys = ("engine", "version", "arch", "verdict", "error", "remedy")
    return [{key: getattr(check, key) for key in keys} for check in verdicts]


def nothing_loads(plan: Plan, verdicts: Sequence[EngineCheck]) -> str | None:
    """That no known engine loads the result, and which recipe's result loads where; else None."""
    if any(check.verdict == "LOADS" for check in verdicts):
        return None
    lines = [f"no known engine loads what recipe {plan.recipe.name} makes of this draft:"]
    lines += verdict_lines(verdicts)
    whys = ((TITLES[check.engine], check.error or "") for check in verdicts)
    lines += dict.fromkeys(why if title in why else f"{title}: {why}" for title, why in whys)
    if plan.recipe.is_for_the_plugin:
        lines.append("with draftquant installed beside them (its plugin), vLLM and SGLang load it")
    for arch, recipes in _alternatives(plan).items():
        lines.append(f"on {gpu_name(arch)} these load: {first_of(recipes, 5)}")
    return "\n  ".join(lines)


def _alternatives(plan: Plan) -> Mapping[str, list[str]]:
    """GPU -> built-in recipes whose result loads there; equal bits and inputs come first.

    Of the GPU after which a recipe is called; of none, of all that are known.
    """
    ours, by_gpu = plan.recipe, dict[str, list[str]]()
    word = ours.name.partition("-")[0]
    named = {gpu.arch for gpu in GPUS.values() if gpu.name in (word, f"{word}x")}
    asked = named or {*ARCHITECTURES}

    def distance(name: str) -> tuple[bool, bool, str]:
        other = load_recipe(name)
        like = str(ours.activations) == str(other.activations)
        return ours.weights.dtype != other.weights.dtype, not like, name

    for name in sorted(built_in_recipes(), key=distance):
        try:
            other = make_plan(load_recipe(name), plan.draft, target_layers=plan.target_layers)
        except DraftQuantError:
            continue  # a recipe that does not fit this draft does not help
        loads = (check.arch for check in planned_verdicts(other) if check.verdict == "LOADS")
        for arch in dict.fromkeys(loads):
            if arch in asked:
                by_gpu.setdefault(arch, []).append(name)
    return by_gpu
