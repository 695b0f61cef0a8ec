"""What several commands share: opening drafts, choosing a recipe, the target's shared tables."""

import argparse
import dataclasses
import typing
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.checkpoint import Checkpoint
from ...quantize.drafts import Draft, read_draft
from ...quantize.hub import DraftSource, resolve_draft
from ...recipes import Recipe, load_recipe
from ...recipes.schema import BackendName

if TYPE_CHECKING:
    from torch import Tensor

    from ...quantize.loading import LoadedDraft


def open_draft(reference: str) -> tuple[DraftSource, Draft]:
    """Resolve a folder or Hub id and read its headers."""
    source = resolve_draft(reference)
    return source, read_draft(Checkpoint.open(source.folder))


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """`--recipe` and `--backend`."""
    parser.add_argument("--recipe", required=True, metavar="R", help="built-in name or .yaml path")
    parser.add_argument(
        "--backend",
        choices=typing.get_args(BackendName),
        help="who computes the codes, instead of the recipe's choice",
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
        help="target folder, for drafts without embedding or head of their own",
    )


def add_num_draft_tokens(parser: argparse.ArgumentParser) -> None:
    """`--num-draft-tokens`."""
    parser.add_argument(
        "--num-draft-tokens",
        "-k",
        type=int,
        default=3,
        metavar="K",
        help="tokens drafted per step, as served (default 3)",
    )


def load_for_replay(references: list[str], target: Path | None) -> "list[LoadedDraft]":
    """Load drafts with their weights in float32."""
    from ...quantize.loading import load_draft

    shared = target_tables(target) if target else None
    return [load_draft(resolve_draft(r).folder, shared=shared) for r in references]


def target_tables(target: Path) -> "dict[str, Tensor]":
    """Embedding and head of a target, under the names that drafts use."""
    from safetensors import safe_open

    checkpoint = Checkpoint.open(target)
    tables: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        for table in ("embed_tokens.weight", "lm_head.weight"):
            if name == table or name.endswith("." + table):
                with safe_open(target / tensor.file, "pt") as file:
                    tables[table] = file.get_tensor(name)
    if checkpoint.config.get("tie_word_embeddings") and "embed_tokens.weight" in tables:
        tables.setdefault("lm_head.weight", tables["embed_tokens.weight"])
    return tables
