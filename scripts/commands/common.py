"""What several commands share: opening drafts, choosing a recipe, the target's tables, K."""

import argparse
import typing
from pathlib import Path
from typing import TYPE_CHECKING

from ...recipes import Recipe, aliases, load_recipe
from ...recipes.errors import short
from ...validate.counting.estimand import DraftSampling
from ..api import opening
from ..api.opening import open_draft as open_draft
from ..api.opening import shared_tables as shared_tables
from ..api.opening import with_algorithm as with_algorithm
from ..console import note

if TYPE_CHECKING:
    from ...calibration.traces.trace_folder import TraceFolder


def add_subtree(parser: argparse.ArgumentParser) -> None:
    """`--subtree`."""
    parser.add_argument(
        "--subtree",
        metavar="PREFIX[,PREFIX...]",
        help="the folder is a target's, and its MTP layer below this prefix the draft"
        " (model.layers.61, model.mtp_layers.0, mtp), or its layers (model.layers.45,"
        "model.layers.46): nothing else is read",
    )


def add_target_layers(parser: argparse.ArgumentParser) -> None:
    """`--target-layers`."""
    parser.add_argument(
        "--target-layers",
        type=int,
        metavar="LAYERS",
        help="decoder layers of the target, for layouts whose excludes are whole names (fp8)",
    )


def named_recipe(reference: str) -> Recipe:
    """The recipe that the command line names; of an alias it is said which one that is.

    Raises:
        RecipeError: see `load_recipe`.
    """
    recipe = load_recipe(reference)
    if reference.lower() in aliases():
        note(f"recipe {reference} is {recipe.name}: {recipe.summary}")
    return recipe


def add_draft_sampling(parser: argparse.ArgumentParser) -> None:
    """`--draft-sampling`."""
    parser.add_argument(
        "--draft-sampling",
        choices=typing.get_args(DraftSampling),
        default="greedy",
        help="how drafts choose their proposals for traces with a temperature, as served: their"
        " most likely token (default), or drawn at that temperature",
    )


def share(text: str) -> float:
    """A share as people write it: 0.01 or 1%.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    number, percent = text.removesuffix("%"), text.endswith("%")
    try:
        return float(number) / (100 if percent else 1)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(
            f"expected a share such as 0.01 or 1%, got {short(text)}"
        ) from exc


def add_num_draft_tokens(parser: argparse.ArgumentParser) -> None:
    """`--num-draft-tokens`."""
    parser.add_argument(
        "--num-draft-tokens",
        "-k",
        type=int,
        metavar="K",
        help="tokens drafted per step, as served (default: 3, or a block draft's whole block)",
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """`--temperature`, `--top-p`, `--top-k` and `--seed`: how text is continued."""
    parser.add_argument(
        "--temperature",
        type=float,
        default=0,
        metavar="TEMPERATURE",
        help="draw tokens (default 0: greedy)",
    )
    parser.add_argument(
        "--top-p", type=float, default=1, metavar="SHARE", help="default 1: all tokens"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="TOKENS", help="default 0: all tokens"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="SEED", help="of the draws (default 0)"
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """`--device`."""
    parser.add_argument(
        "--device",
        default="auto",
        metavar="DEVICE",
        help="auto (the first GPU that torch sees, else the CPU), cpu, cuda or cuda:I",
    )


def add_target(parser: argparse.ArgumentParser) -> None:
    """`--target`, see `shared_tables`."""
    parser.add_argument(
        "--target",
        type=Path,
        metavar="TARGET",
        help="target folder, for drafts without embedding or head where the traces carry neither,"
        " and for recipes that drop what equals the target's",
    )


def add_allow_zero_rows(parser: argparse.ArgumentParser) -> None:
    """`--allow-zero-rows`."""
    parser.add_argument(
        "--allow-zero-rows",
        action="store_true",
        help="store all-zero rows instead of refusing them",
    )


def draft_on_traces(
    folder: Path, traces: "TraceFolder", options: argparse.Namespace
) -> opening.DraftOnTraces:
    """Load a draft by `--device`, `--target` and `--num-draft-tokens`."""
    return opening.draft_on_traces(
        folder,
        traces,
        device=options.device,
        target=options.target,
        num_draft_tokens=options.num_draft_tokens,
    )


def comma_numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between, for argparse."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as exc:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers with commas between, got {text!r}"
        ) from exc
