"""`estimate`: bytes, time and break-even acceptance of a draft, from headers alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ...quantize.errors import LayoutError, PlanError
from ...quantize.estimate.context_lengths import at_contexts
from ...quantize.estimate.draft_length import LengthAdvice
from ...quantize.estimate.draft_round import (
    USUAL_CONTEXT,
    checked_num_draft_tokens,
    usual_context,
)
from ...quantize.estimate.estimate_report import EstimateReport
from ...quantize.estimate.forms import ONLINE_HEADS
from ...quantize.estimate.step_estimate import (
    Estimate,
    checked_concurrencies,
    checked_efficiency,
    checked_launch,
    make_estimate,
)
from ...quantize.estimate.target import (
    Target,
    parse_step_times,
    step_of_bytes,
    step_of_config,
)
from ...quantize.estimate.work import Machine
from ...quantize.files.checkpoint import CONFIG_FILE, read_json_object
from ...quantize.files.hub import no_target
from ...quantize.gpus import USUAL_GPUS, named_gpu
from ...quantize.quantization_plan import Plan, make_plan
from ...recipes import built_in_recipes
from ...recipes.bounds import AT_LEAST_1
from ...recipes.formats import KvCacheChoice, OnlineHead
from ...validate.judging.policy import resolve_policy
from . import arguments, reports
from .arguments import served_form
from .form_engines import engines_of_forms
from .opening import named_recipe, open_draft
from .option import Option
from .references import AnyRecipe, optional_path
from .settings import Settings
from .verb import verb

if TYPE_CHECKING:
    from ...quantize.drafts import Draft


@dataclass(frozen=True, slots=True)
class EstimateSettings(Settings):
    """Of which draft, by which recipes, on which GPUs, beside which target."""

    draft: arguments.Draft
    _: KW_ONLY
    recipes: Annotated[
        Sequence[AnyRecipe],
        Option(
            "recipe to compare: a built-in name or a .yaml file; repeat for more "
            "(default: all that fit the draft)",
            "RECIPE",
            flag="--recipe",
            several="repeated",
        ),
    ] = ()
    gpus: Annotated[
        Sequence[str],
        Option(
            f"h100, mi325x, ..., may be repeated; default: {', '.join(USUAL_GPUS)}",
            "GPU",
            flag="--gpu",
            several="repeated",
        ),
    ] = ()
    vocab_size: Annotated[
        Sequence[int],
        Option(
            "kept rows of a cut head, to compare beside the recipes: such as 16000,32000 "
            "('draftquant vocab' makes them)",
            "ROWS,...",
            several="commas",
        ),
    ] = ()
    head_online: Annotated[
        Sequence[OnlineHead],
        Option(
            "what the head is quantized to, to compare beside the recipes: "
            f"{', '.join(ONLINE_HEADS)} (default: fp8 where the draft has a head of its own)",
            "FORMAT,...",
            several="commas",
        ),
    ] = ()
    kv_cache_dtype: Annotated[
        KvCacheChoice,
        Option(
            "KV cache to compare besides: fp8_e4m3, with what it saves at 1k to 128k positions"
            " (default: auto, as recipes say)"
        ),
    ] = "auto"
    num_draft_tokens: arguments.NumDraftTokens = None
    context: Annotated[
        int | None,
        Option(
            f"positions per sequence (default: {USUAL_CONTEXT}, or fewer where the config.json of"
            " DRAFT or of --target allows no more)",
            "TOKENS",
            bounds=AT_LEAST_1,
        ),
    ] = None
    concurrency: Annotated[
        Sequence[int],
        Option(
            "concurrent sequences (default: 1,2,4,8,16,32,64)", "SEQUENCES,...", several="commas"
        ),
    ] = (1, 2, 4, 8, 16, 32, 64)
    tp: Annotated[int, Option("tensor-parallel size (default 1)", "GPUS")] = 1
    efficiency: Annotated[
        float,
        Option(
            "share of the data sheet's bandwidth and peak that kernels reach (default 0.75)",
            "SHARE",
        ),
    ] = 0.75
    launch_us: Annotated[
        float,
        Option(
            "microseconds of each kernel that quantized q, k and v of a block draft add"
            " (default 0: counted, not priced)",
            "MICROSECONDS",
        ),
    ] = 0.0
    target_step_ms: Annotated[
        str | float | None,
        Option(
            "measured time of the target's verify step in ms: 14.2, or by concurrency"
            " 1=9.5,8=14.2,64=38",
            "MILLISECONDS",
        ),
    ] = None
    target: Annotated[
        arguments.AnyPath | None,
        Option("folder with the config.json of the (dense) target", "TARGET"),
    ] = None
    target_bytes: Annotated[
        float | None,
        Option("bytes of target weights read per token, such as 140e9", "BYTES"),
    ] = None
    acceptance: Annotated[
        Sequence[str],
        Option(
            "measured acceptance, from which the number of draft tokens is advised: what 'replay"
            " --json' printed, a gate's report or a measurement, of the draft as it is; with"
            " RECIPE= in front of that recipe's; repeat for more",
            "[RECIPE=]FILE",
            several="repeated",
        ),
    ] = ()
    target_layers: arguments.TargetLayers = None

    exclusive = (("target_step_ms", "target", "target_bytes"),)


@verb(EstimateSettings)
def estimate(settings: EstimateSettings) -> "reports.EstimateReport":
    """Estimate how long one draft step takes, and how much acceptance quantization may cost.

    Returns:
        Bytes and milliseconds of the unquantized draft and of each recipe's draft, on each GPU.

    Raises:
        DraftQuantError: the draft, a recipe, a GPU or the target cannot be estimated.
    """
    gpus = dict.fromkeys(named_gpu(name).name for name in settings.gpus or USUAL_GPUS)
    efficiency = checked_efficiency(settings.efficiency)
    concurrencies = checked_concurrencies(settings.concurrency)
    _, draft = open_draft(settings.draft)
    num_draft_tokens = checked_num_draft_tokens(draft.geometry, settings.num_draft_tokens)
    plans, refused = _plans(draft, settings)
    context = settings.context
    if context is None:
        context = usual_context(_configs(draft, optional_path(settings.target)))
    launch = checked_launch(settings.launch_us)
    machines = tuple(
        Machine(gpu=named_gpu(name), efficiency=efficiency, launch_seconds=launch) for name in gpus
    )
    kv_cache = served_form(None, settings.kv_cache_dtype).kv_cache
    found = make_estimate(
        draft,
        plans,
        num_draft_tokens=num_draft_tokens,
        context=context,
        tp=settings.tp,
        vocab_sizes=settings.vocab_size,
        heads=settings.head_online,
        kv_cache=kv_cache,
    )

    def target_at(k: int) -> Target | None:
        return _target(draft, settings, k, concurrencies, context)

    return EstimateReport(
        estimate=found,
        serving=engines_of_forms(found, [machine.gpu for machine in machines]),
        refused=refused,
        machines=machines,
        concurrencies=concurrencies,
        target=target_at(num_draft_tokens),
        allowed_drop=resolve_policy("release").max_relative_drop,
        context_by_config=settings.context is None and context < USUAL_CONTEXT,
        by_context=()
        if kv_cache is None
        else tuple(at_contexts(found, machines[0], concurrencies[-1])),
        lengths=_lengths(settings, found, machines, concurrencies, target_at),
    )


def _lengths(
    settings: EstimateSettings,
    found: Estimate,
    machines: Sequence[Machine],
    concurrencies: Sequence[int],
    target_at: Callable[[int], Target | None],
) -> tuple[LengthAdvice, ...]:
    """How many tokens to draft, where measured acceptance is given."""
    if not settings.acceptance:
        return ()  # the advice needs scipy and torch, an estimate neither
    from ...validate.draft_length.acceptance_of_forms import acceptance_of_forms, check_recorded
    from ...validate.draft_length.advise import advise_lengths

    forms = [one.name for one in found.candidates]
    recorded = acceptance_of_forms(settings.acceptance, found.draft, forms)
    check_recorded(settings.num_draft_tokens, recorded)
    return advise_lengths(found, machines, concurrencies, recorded, target_at)


def _configs(draft: "Draft", target: Path | None) -> list[Mapping[str, Any]]:
    """Of the draft, and of the target where its folder is given."""
    if target is None:
        return [draft.checkpoint.config]
    return [draft.checkpoint.config, read_json_object(target / CONFIG_FILE, no_target(target))]


def _plans(draft: "Draft", settings: EstimateSettings) -> tuple[list[Plan], Mapping[str, str]]:
    """Plans of the recipes asked for; of all that are shipped, those that there are, and why not.

    Raises:
        PlanError, LayoutError: a recipe that was asked for does not fit the draft.
    """
    plans, refused = [], {}
    named = [named_recipe(one, settings.listener) for one in settings.recipes or built_in_recipes()]
    for recipe in (one for place, one in enumerate(named) if one not in named[:place]):
        try:
            plans.append(make_plan(recipe, draft, target_layers=settings.target_layers))
        except (PlanError, LayoutError) as exc:
            if settings.recipes:
                raise
            refused[recipe.name] = exc.what
    return plans, refused


def _target(
    draft: "Draft",
    settings: EstimateSettings,
    num_draft_tokens: int,
    concurrencies: Sequence[int],
    context: int,
) -> Target | None:
    if settings.target_step_ms is not None:
        return parse_step_times(str(settings.target_step_ms), concurrencies)
    if settings.target_bytes is not None:
        return step_of_bytes(
            settings.target_bytes, num_draft_tokens=num_draft_tokens, tp=settings.tp
        )
    if settings.target is not None:
        return step_of_config(
            Path(settings.target),
            num_draft_tokens=num_draft_tokens,
            context=context,
            tp=settings.tp,
            vocab_size=draft.geometry.vocab_size,
        )
    return None
