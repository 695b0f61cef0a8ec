"""What several commands share: opening drafts, choosing a recipe, the target's tables, K."""

import argparse
import dataclasses
import typing
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.drafts import Draft, read_draft
from ...quantize.files.checkpoint import Checkpoint
from ...quantize.files.hub import DraftSource, resolve_draft
from ...quantize.lints import check_vocabulary_map
from ...recipes import Recipe, load_recipe
from ...recipes.schema import BackendName

if TYPE_CHECKING:
    from ...calibration.target_tables import SharedTables
    from ...calibration.traces import TraceFolder
    from ...quantize.stored.loading import LoadedDraft


def open_draft(reference: str) -> tuple[DraftSource, Draft]:
    """Resolve a folder or Hub id and read its headers and vocabulary map."""
    source = resolve_draft(reference)
    draft = read_draft(Checkpoint.open(source.folder))
    check_vocabulary_map(draft)
    return source, draft


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """`--recipe`, `--backend` and `--target-layers`."""
    parser.add_argument("--recipe", required=True, metavar="R", help="built-in name or .yaml path")
    parser.add_argument(
        "--backend",
        choices=typing.get_args(BackendName),
        help="who computes the codes, instead of the recipe's choice",
    )
    parser.add_argument(
        "--target-layers",
        type=int,
        metavar="N",
        help="decoder layers of the target, for layouts whose excludes are whole names (fp8)",
    )


def chosen_recipe(options: argparse.Namespace) -> Recipe:
    """The recipe with `--backend` applied."""
    recipe = load_recipe(options.recipe)
    if options.backend:
        recipe = dataclasses.replace(recipe, backend=options.backend)
    return recipe


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """`--traces`, `--num-draft-tokens` and `--target`."""
    parser.add_argument("--traces", required=True, type=Path, metavar="T", help="trace folder")
    add_num_draft_tokens(parser)
    parser.add_argument(
        "--target",
        type=Path,
        metavar="M",
        help="target folder, for drafts without embedding or head where the traces carry neither",
    )


def add_num_draft_tokens(parser: argparse.ArgumentParser) -> None:
    """`--num-draft-tokens`."""
    parser.add_argument(
        "--num-draft-tokens",
        "-k",
        type=int,
        metavar="K",
        help="tokens drafted per step, as served (default: 3, or a block draft's whole block)",
    )


def load_for_replay(
    references: list[str], shared: "SharedTables", *, rope_theta: float | None = None
) -> "list[LoadedDraft]":
    """Load drafts with their weights in float32; `rope_theta` replaces that of their configs."""
    from ...quantize.stored.loading import load_draft

    folders = [resolve_draft(reference).folder for reference in references]
    return [load_draft(folder, shared=shared, rope_theta=rope_theta) for folder in folders]


def shared_tables(traces: "TraceFolder", target: Path | None) -> "SharedTables":
    """Embedding and head for drafts without: the target's if it is given, else the traces'."""
    from ...calibration.target_tables import TargetTables

    return TargetTables.find(target).shared() if target else traces.tables()


def comma_numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between, for argparse."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as exc:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers with commas between, got {text!r}"
        ) from exc
