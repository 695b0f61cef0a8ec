"""The recipes that `--recipe auto` can choose: those whose drafts load, the fastest first."""

from ...calibration.passes.devices import resolve_device
from ...quantize.asked import Estimating, Quantizing
from ...quantize.drafts import Draft
from ...quantize.engines.engine import Engine
from ...quantize.engines.plan_verdicts import planned_verdicts
from ...quantize.engines.versions import ENGINES
from ...quantize.estimate.draft_step import checked_num_draft_tokens, usual_context
from ...quantize.estimate.estimate_report import candidates_of
from ...quantize.estimate.work import Machine, VerifyStep
from ...quantize.estimated import plans_that_fit
from ...quantize.gpus import Gpu, gpu_name, gpu_names, named_gpu
from ...quantize.planning.quantization_plan import Plan
from ...recipes import aliases
from ...recipes.errors import CheckpointError, PlanError
from ...recipes.schema import RoundingChoice
from .recipe_selection import Contender, Selection

_BETTER_FIRST: tuple[RoundingChoice, ...] = ("learned", "gptq", "nearest")


def contenders(draft: Draft, asked: Quantizing) -> tuple[Selection, dict[str, Plan]]:
    """The selection before anything is tried, and the plan of each contender by name."""
    if why := draft.family.no_maths(draft.geometry):
        raise PlanError(
            draft.checkpoint.folder,
            f"no recipe can be chosen by replay, because {why}",
            fix="name a recipe that needs no traces, such as fp8-ptpc, then compare what two"
            " servers accept: draftquant measure, then gate --measured",
        )
    gpu, engine = _place(asked)
    plans, left_out = _plans_that_load(draft, gpu, asked)
    where = gpu_name(gpu.arch, asked.gpu)
    if not plans:
        raise CheckpointError(
            draft.checkpoint.folder,
            f"no built-in recipe makes a draft that {engine.title} is known to load on {where}",
            details=[f"{name}: {why}" for name, why in left_out.items()],
            fix="name another engine or GPU: 'draftquant recipes list' shows where recipes load",
        )
    unquantized, *others = _estimated(draft, list(plans.values()), gpu, asked)

    def order(one: Contender) -> tuple[object, ...]:
        """Of equally fast ones what rounds fewer bits away, and better, comes first."""
        recipe = plans[one.name].recipe
        return (
            float(f"{one.drafting_seconds:.6e}"),
            -16 if recipe.activations is None else -recipe.activations.number.bits,
            _BETTER_FIRST.index(recipe.algorithm.rounding),
            one.name != aliases().get(gpu.name),
            one.name,
        )

    first: dict[object, str] = {}
    for one in sorted(others, key=order):
        known = first.setdefault(_arithmetic(plans[one.name]), one.name)
        if known != one.name:
            left_out[one.name] = f"its arithmetic is that of {known}"
    selection = Selection(
        engine=f"{engine.title} {engine.version}",
        gpu=where,
        unquantized=unquantized,
        contenders=tuple(sorted((o for o in others if o.name not in left_out), key=order)),
        left_out=left_out,
        verify_seconds=None if asked.target_step_ms is None else asked.target_step_ms / 1e3,
    )
    return selection, plans


def _arithmetic(plan: Plan) -> object:
    """What a draft computes with, however it is stored."""
    formats = ((step.row.canonical, plan.recipe_of(step)) for step in plan.quantized)
    return plan.recipe.kv_cache, frozenset(
        (name, recipe.weights, recipe.activations, recipe.algorithm) for name, recipe in formats
    )


def _place(asked: Quantizing) -> tuple[Gpu, Engine]:
    assert asked.gpu is not None  # settings were checked
    assert asked.engine is not None
    gpu, engine = named_gpu(asked.gpu), ENGINES[asked.engine]
    if gpu.arch not in engine.gpus:
        raise CheckpointError(
            "--gpu",
            f"{engine.title} was never executed on {gpu_name(gpu.arch, asked.gpu)}",
            fix=f"it is known on {gpu_names(engine.gpus)}",
        )
    return gpu, engine


def _plans_that_load(
    draft: Draft, gpu: Gpu, asked: Quantizing
) -> tuple[dict[str, Plan], dict[str, str]]:
    """Plans of the recipes whose drafts load, by name; and why each other recipe is left out."""
    asking = Estimating(asked.draft, target_layers=asked.target_layers, listener=asked.listener)
    fitting, misfits = plans_that_fit(draft, asking)
    problems = {plan.recipe.name: _problem(plan, gpu, asked) for plan in fitting}
    plans = {plan.recipe.name: plan for plan in fitting if problems[plan.recipe.name] is None}
    return plans, {**misfits, **{name: why for name, why in problems.items() if why is not None}}


def _problem(plan: Plan, gpu: Gpu, asked: Quantizing) -> str | None:
    recipe = plan.recipe
    if not asked.head and any("head" in r.role for r in recipe.rules if r.action == "quantize"):
        return "it rounds the head too (--head)"
    learned = recipe.algorithm.rounding == "learned"
    if learned and resolve_device(asked.device).type == "cpu":
        return "its rounding is learned, which takes a GPU at real width (--device)"
    checks = planned_verdicts(plan, arch=gpu.arch, tp=asked.tp, fix_config=asked.fix_config)
    check = next(check for check in checks if check.engine == asked.engine)
    return None if check.verdict == "LOADS" else check.error or check.verdict


def _estimated(
    draft: Draft, plans: list[Plan], gpu: Gpu, asked: Quantizing
) -> tuple[Contender, ...]:
    served = VerifyStep(
        checked_num_draft_tokens(draft.geometry, asked.num_draft_tokens),
        asked.context or usual_context(draft.checkpoint.config),
        asked.tp,
        asked.concurrency,
    )
    machine = Machine(gpu=gpu, efficiency=Estimating.efficiency)
    return tuple(
        Contender(
            name=each.name,
            stored_bytes=each.stored_bytes,
            drafting_seconds=machine.round_seconds(each.round, asked.concurrency),
        )
        for each in candidates_of(draft, plans, served)
    )
