"""What several commands share: opening drafts, choosing a recipe, the target's tables, K."""

import argparse
import dataclasses
import typing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...quantize.drafts import Draft, read_draft
from ...quantize.files.hub import DraftSource, resolve_draft
from ...quantize.lints import check_vocabulary_map
from ...recipes import Recipe, load_recipe
from ...recipes.errors import RecipeError, short
from ...recipes.refused import named_algorithm, refusal
from ...recipes.schema import ALGORITHMS, BackendName
from ...validate.estimand import DraftSampling

if TYPE_CHECKING:
    import torch

    from ...calibration.traces.folder import TraceFolder
    from ...calibration.traces.target_tables import SharedTables
    from ...quantize.stored.loading import LoadedDraft
    from ...validate.measure.plan import DraftIdentity


def open_draft(reference: str, subtree: str | None = None) -> tuple[DraftSource, Draft]:
    """Resolve a folder or Hub id and read its headers and vocabulary map."""
    source = resolve_draft(reference, subtree)
    draft = read_draft(source.checkpoint())
    check_vocabulary_map(draft)
    return source, draft


def draft_identity(reference: str) -> "DraftIdentity":
    """A draft's identity, as the gate knows it."""
    from ...validate.measure.plan import DraftIdentity
    from ...validate.pairing import DraftFolder

    folder = DraftFolder.read(resolve_draft(reference).folder)
    quantization = "of another tool" if folder.quantized else "none"
    if folder.quantized_by is not None:
        quantization = folder.quantized_by.recipe.name
    given = Path(reference)
    return DraftIdentity(
        draft=given.resolve().name if given.is_dir() else reference,
        draft_sha256=folder.sha256,
        draft_quantization=quantization,
    )


def add_subtree(parser: argparse.ArgumentParser) -> None:
    """`--subtree`."""
    parser.add_argument(
        "--subtree",
        metavar="PREFIX[,PREFIX...]",
        help="the folder is a target's, and its MTP layer below this prefix the draft"
        " (model.layers.61, model.mtp_layers.0, mtp), or its layers (model.layers.45,"
        "model.layers.46): nothing else is read",
    )


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """`--recipe`, `--backend`, `--algorithm` and `--target-layers`."""
    parser.add_argument("--recipe", required=True, metavar="R", help="built-in name or .yaml path")
    parser.add_argument(
        "--backend",
        choices=typing.get_args(BackendName),
        help="who computes the codes, instead of the recipe's choice",
    )
    parser.add_argument(
        "--algorithm",
        metavar=f"{{{','.join(ALGORITHMS)}}}",
        help="how codes and scales are found, instead of the recipe's choice; computed by backend"
        " torch unless --backend says otherwise",
    )
    add_target_layers(parser)


def add_target_layers(parser: argparse.ArgumentParser) -> None:
    """`--target-layers`."""
    parser.add_argument(
        "--target-layers",
        type=int,
        metavar="N",
        help="decoder layers of the target, for layouts whose excludes are whole names (fp8)",
    )


def chosen_recipe(options: argparse.Namespace) -> Recipe:
    """The recipe with `--backend` and `--algorithm` applied.

    Raises:
        RecipeError: the recipe is wrong, or its backend does not run the algorithm.
    """
    recipe = load_recipe(options.recipe)
    if options.algorithm:
        recipe = with_algorithm(recipe, options.algorithm, options.backend or "torch")
    elif options.backend:
        recipe = dataclasses.replace(recipe, backend=options.backend)
    refused = refusal(recipe.backend, recipe.algorithm)
    if refused is not None:
        where = f"recipe {recipe.name}: backend {recipe.backend}, {recipe.algorithm}"
        raise RecipeError(where, refused.reason, fix=refused.fix)
    return recipe


def with_algorithm(recipe: Recipe, name: str, backend: BackendName = "torch") -> Recipe:
    """A recipe by what the command line calls `name`, computed by a backend.

    Raises:
        RecipeError: the backend does not run it, or no algorithm has this name.
    """
    scale, rounding = named_algorithm(name, backend)
    algorithm = dataclasses.replace(recipe.algorithm, scale=scale, rounding=rounding)
    return dataclasses.replace(recipe, algorithm=algorithm, backend=backend)


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
        "--temperature", type=float, default=0, metavar="T", help="draw tokens (default 0: greedy)"
    )
    parser.add_argument("--top-p", type=float, default=1, metavar="P", help="default 1: all tokens")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="default 0: all tokens")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draws (default 0)")


def add_device(parser: argparse.ArgumentParser) -> None:
    """`--device`."""
    parser.add_argument(
        "--device",
        default="auto",
        metavar="D",
        help="auto (the first GPU that torch sees, else the CPU), cpu, cuda or cuda:I",
    )


def add_target(parser: argparse.ArgumentParser) -> None:
    """`--target`, see `shared_tables`."""
    parser.add_argument(
        "--target",
        type=Path,
        metavar="M",
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


def shared_tables(
    traces: "TraceFolder", target: Path | None, device: "torch.device"
) -> "SharedTables":
    """Embedding and head for drafts without: the target's if it is given, else the traces'.

    As they are stored, so that a draft that is loaded compact holds them so.
    """
    from ...calibration.traces.target_tables import TargetTables

    if target:
        return TargetTables.find(target).shared(None, device)
    return traces.tables(None, device)


class DraftOnTraces(NamedTuple):
    """A draft that is loaded to run along traces.

    Attributes:
        draft: unquantized, held as narrow as it is stored.
        shared: the target's tables that it may share.
        num_draft_tokens: K, as asked or its own.
    """

    draft: "LoadedDraft"
    shared: "SharedTables"
    num_draft_tokens: int


def draft_on_traces(
    folder: Path, traces: "TraceFolder", options: argparse.Namespace
) -> DraftOnTraces:
    """Load a draft by `--device`, `--target` and `--num-draft-tokens`."""
    from ...calibration.passes.devices import resolve_device
    from ...quantize.stored.loading import load_draft
    from ...validate.replay import chosen_num_draft_tokens

    device = resolve_device(options.device)
    shared = shared_tables(traces, options.target, device)
    draft = load_draft(folder, device=device, compact=True, shared=shared)
    return DraftOnTraces(draft, shared, chosen_num_draft_tokens(options.num_draft_tokens, [draft]))


def comma_numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between, for argparse."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as exc:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers with commas between, got {text!r}"
        ) from exc
