"""`draftquant estimate`: bytes, time and break-even acceptance of a draft, from headers alone."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...quantize.drafts import Draft
from ...quantize.errors import LayoutError, PlanError
from ...quantize.estimate.draft_round import (
    USUAL_CONTEXT,
    checked_num_draft_tokens,
    usual_context,
)
from ...quantize.estimate.estimate import (
    checked_concurrencies,
    checked_efficiency,
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
from ...quantize.gpus import USUAL_GPUS, named_gpu
from ...quantize.plan import Plan, make_plan
from ...recipes import built_in_recipes
from ..console import print_json
from .common import add_num_draft_tokens, comma_numbers, named_recipe, open_draft
from .estimate_data import Report, to_mapping
from .estimate_report import print_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`estimate DRAFT`."""
    parser.add_argument("draft", metavar="DRAFT", help="draft folder or Hub id (owner/name)")
    parser.add_argument(
        "--recipe",
        action="append",
        metavar="RECIPE",
        help="built-in name or .yaml path, may be repeated; default: all that fit the draft",
    )
    parser.add_argument(
        "--gpu",
        action="append",
        metavar="GPU",
        help=f"h100, mi325x, ..., may be repeated; default: {', '.join(USUAL_GPUS)}",
    )
    add_num_draft_tokens(parser)
    parser.add_argument(
        "--context",
        type=int,
        metavar="TOKENS",
        help=f"positions per sequence (default: {USUAL_CONTEXT}, or fewer where the config.json of"
        " DRAFT or of --target allows no more)",
    )
    parser.add_argument(
        "--concurrency",
        type=comma_numbers,
        default=(1, 2, 4, 8, 16, 32, 64),
        metavar="SEQUENCES,...",
        help="sequences at once (1,2,4,8,16,32,64)",
    )
    parser.add_argument("--tp", type=int, default=1, metavar="GPUS", help="tensor-parallel shards")
    parser.add_argument(
        "--efficiency",
        type=float,
        default=0.75,
        metavar="SHARE",
        help="share of the data sheets' bandwidths and peaks that kernels reach (0.75)",
    )
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--target-step-ms",
        metavar="MILLISECONDS",
        help="the target's verify step as measured: 14.2, or by concurrency 1=9.5,8=14.2,64=38",
    )
    target.add_argument(
        "--target",
        type=Path,
        metavar="TARGET",
        help="folder with the config.json of a dense target",
    )
    target.add_argument(
        "--target-bytes",
        type=float,
        metavar="BYTES",
        help="bytes of the target's weights that one token reads, such as 140e9",
    )
    parser.add_argument(
        "--target-layers",
        type=int,
        metavar="LAYERS",
        help="decoder layers of the target, for layouts whose excludes are whole names (fp8)",
    )


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    gpus = tuple(dict.fromkeys(named_gpu(name).name for name in options.gpu or USUAL_GPUS))
    efficiency = checked_efficiency(options.efficiency)
    concurrencies = checked_concurrencies(options.concurrency)
    _, draft = open_draft(options.draft)
    num_draft_tokens = checked_num_draft_tokens(draft.geometry, options.num_draft_tokens)
    plans, refused = _plans(draft, options)
    asked = options.context
    if asked is None:
        options.context = usual_context(_configs(draft, options.target))
    estimate = make_estimate(
        draft, plans, num_draft_tokens=num_draft_tokens, context=options.context, tp=options.tp
    )
    report = Report(
        estimate=estimate,
        plans={plan.recipe.name: plan for plan in plans},
        refused=refused,
        machines=tuple(Machine(gpu=named_gpu(name), efficiency=efficiency) for name in gpus),
        concurrencies=concurrencies,
        target=_target(draft, num_draft_tokens, concurrencies, options),
        context_by_config=asked is None and options.context < USUAL_CONTEXT,
    )
    if options.json:
        print_json(to_mapping(report))
    else:
        print_report(report)
    return 0


def _configs(draft: Draft, target: Path | None) -> list[Mapping[str, Any]]:
    """Of the draft, and of the target where its folder is given."""
    if target is None:
        return [draft.checkpoint.config]
    fix = "give the folder of the target"
    return [draft.checkpoint.config, read_json_object(target / CONFIG_FILE, fix)]


def _plans(draft: Draft, options: argparse.Namespace) -> tuple[list[Plan], Mapping[str, str]]:
    """Plans of the recipes asked for; of all that are shipped, those that there are, and why not.

    Raises:
        PlanError: a recipe that was asked for does not fit the draft. LayoutError: likewise.
    """
    names = dict.fromkeys(options.recipe or built_in_recipes())
    plans, refused = [], {}
    for recipe in map(named_recipe, names):
        try:
            plans.append(make_plan(recipe, draft, target_layers=options.target_layers))
        except (PlanError, LayoutError) as exc:
            if options.recipe:
                raise
            refused[recipe.name] = exc.what
    return plans, refused


def _target(
    draft: Draft,
    num_draft_tokens: int,
    concurrencies: Sequence[int],
    options: argparse.Namespace,
) -> Target | None:
    if options.target_step_ms is not None:
        return parse_step_times(options.target_step_ms, concurrencies)
    if options.target_bytes is not None:
        return step_of_bytes(options.target_bytes, num_draft_tokens=num_draft_tokens, tp=options.tp)
    if options.target is not None:
        return step_of_config(
            options.target,
            num_draft_tokens=num_draft_tokens,
            context=options.context,
            tp=options.tp,
            vocab_size=draft.geometry.vocab_size,
        )
    return None
