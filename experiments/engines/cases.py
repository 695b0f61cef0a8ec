"""The folders that the engines are asked to load: every recipe on every family.

They are tiny drafts with real names, quantized by draftquant itself. Every dimension keeps the
divisibility of the published drafts, so that an engine refuses a tiny draft for the reason for
which it would refuse the real one, also in two tensor-parallel shards.
"""

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from asking import NUM_TARGET_LAYERS, TARGET_FOLDER, write_target
from data_free import LAYERS_ALONE
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.planning.quantization_plan import MeasuredInputs, make_plan
from draftquant.recipes import DraftQuantError, Recipe, load_recipe
from formats import FamilyName, all_formats
from heads import BEYOND, HEAD, LOADED
from mixes import KEPT_DOWN, MIXES
from tiny import tiny_eagle3_llama
from tiny_dflash import tiny_dflash
from tiny_dspark import tiny_dspark, tiny_dspark_mla
from tiny_llama import tiny_language_model
from tiny_mla import tiny_eagle3_mla

INPUT_SCALE = 0.01
SHAPE: dict[str, Any] = {"hidden": 256, "intermediate": 512, "vocab": 512}
# 512 rows of q, 256 of k and of v: each shard of two is whole blocks of 128.
HEADS: dict[str, Any] = {**SHAPE, "heads": 8, "kv_heads": 4, "head_dim": 64}
# As in the published drafts, kv_a_proj_with_mqa alone is not whole blocks of 128: 192 rows for 576;
# nor are those of all layers of a dspark-mla, which vLLM joins: three layers for five.
MLA: dict[str, Any] = {
    **SHAPE, "heads": 4, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
Kind = Literal["recipe", "format", "mixed", "beyond"]
DTYPES = {"BF16": "bfloat16", "F16": "float16"}

_SOURCES: dict[FamilyName, tuple[Callable[..., Path], dict[str, Any]]] = {
    "eagle3-llama": (tiny_eagle3_llama, {**HEADS, "pruned_vocabulary": True}),
    "eagle3-mla": (tiny_eagle3_mla, MLA),
    "dflash": (tiny_dflash, {**HEADS, "num_layers": 2}),
    "dflash2": (tiny_dflash, {**HEADS, "num_layers": 2, "kind": "dflash2"}),
    "dspark": (tiny_dspark, {**HEADS, "num_layers": 2, "rank": 128}),
    "dspark-mla": (tiny_dspark_mla, {**MLA, "num_layers": 3, "rank": 128}),
    "language-model": (tiny_language_model, {**HEADS, "num_layers": 2}),
}
FAMILIES = tuple(_SOURCES)
READS: dict[FamilyName, tuple[int, ...]] = {
    **dict.fromkeys(("eagle3-llama", "eagle3-mla"), (2, 4, 5)),
    **dict.fromkeys(("dflash", "dflash2", "dspark", "dspark-mla"), (2, 4, 6)),
    "language-model": (),
}
"""The target's layers whose inputs the drafts read; of EAGLE-3 the default for 8 layers."""


@dataclass(frozen=True, slots=True)
class Case:
    """One draft folder.

    Attributes:
        name: of the folder.
        kind: "recipe": what draftquant ships; "format": what its layouts can store besides;
            "mixed": several formats in one draft; "beyond": the head or fc quantized as well, or
            left to the target.
        what: one line.
        recipe: what it was quantized with; None = not quantized.
        tp: numbers of tensor-parallel shards to load it in.
        reads: the target's layers whose inputs the draft reads.
        refused: why draftquant itself does not write this folder; then there is none.
    """

    name: str
    kind: Kind
    family: str
    what: str
    recipe: str | None = None
    tp: tuple[int, ...] = (1, 2)
    reads: tuple[int, ...] = ()
    refused: str | None = None


def write_cases(out: Path) -> list[Case]:
    """Write all folders and the target's config; `out` is created."""
    out.mkdir()
    write_target(out / TARGET_FOLDER)
    workshop = Workshop(out)
    kinds = (recipe_cases, format_cases, mixed_cases, beyond_cases)
    cases = [case for make in kinds for case in make(workshop)]
    shutil.rmtree(workshop.sources)
    return cases


class Workshop:
    """Makes unquantized drafts, and quantizes them into folders of `out`."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.sources = out / "sources"
        self.sources.mkdir()

    def source(self, family: FamilyName, *, dtype: str = "BF16", **changes: Any) -> Path:
        """An unquantized draft; `changes` are arguments of the family's builder."""
        build, arguments = _SOURCES[family]
        number = len(list(self.sources.iterdir()))
        return build(self.sources / f"{family}-{number}", dtype=dtype, **arguments | changes)

    def quantize(self, source: Path, recipe: Recipe, name: str) -> Path:
        """Quantize into the folder `name`, with the same scale for every static input.

        Raises:
            DraftQuantError: the recipe does not fit the draft.
        """
        recipe = dataclasses.replace(recipe, backend="torch")  # same bytes, without the toolkits
        draft = read_draft(Checkpoint.open(source))
        plan = make_plan(recipe, draft, target_layers=NUM_TARGET_LAYERS)
        modules = [step.row.tensor.name.removesuffix(".weight") for step in plan.quantized]
        scales = dict.fromkeys(modules, INPUT_SCALE) if recipe.needs_input_scales else {}
        origin = "constant" if scales else None
        measured = MeasuredInputs(input_scales=scales, input_scale_origin=origin)
        quantize_draft(plan, self.out / name, source=DraftSource(folder=source), measured=measured)
        return self.out / name


def recipe_cases(
    workshop: Workshop,
    families: Sequence[FamilyName] = FAMILIES,
    recipes: Sequence[Recipe] = tuple(map(load_recipe, LAYERS_ALONE)),
) -> list[Case]:
    """Every family as it is, and with every built-in recipe."""
    cases = []
    for family in families:
        name = f"{family}--unquantized"
        shutil.copytree(workshop.source(family), workshop.out / name)
        cases.append(Case(name, "recipe", family, "BF16, as trained", reads=READS[family]))
    return cases + [
        _quantized(workshop, "recipe", family, recipe) for family in families for recipe in recipes
    ]


def format_cases(workshop: Workshop) -> list[Case]:
    """Every family with every pair of formats in every layout that stores it."""
    shipped = [load_recipe(name) for name in LAYERS_ALONE]
    covered = [(recipe.layout, recipe.weights, recipe.activations) for recipe in shipped]
    return [
        dataclasses.replace(_quantized(workshop, "format", family, recipe), tp=(1,))
        for family in FAMILIES
        for recipe in all_formats()
        if (recipe.layout, recipe.weights, recipe.activations) not in covered
    ]


def mixed_cases(workshop: Workshop) -> list[Case]:
    """Every family with every recipe of several formats, BF16 beside others among them."""
    several = [*MIXES.values(), KEPT_DOWN]
    return [_quantized(workshop, "mixed", family, own) for family in FAMILIES for own in several]


def beyond_cases(workshop: Workshop) -> list[Case]:
    """Every family with recipes for more than its layers.

    A DFlash draft has a head of its own where that is quantized, which vLLM takes for such a one
    where config.json says so.
    """
    cases = []
    for recipe in (BEYOND[name] for name in LOADED):
        of_head = any(rule.tensor == HEAD for rule in recipe.rules)
        own = {"dflash": {"head": of_head}}
        cases += [_quantized(workshop, "beyond", f, recipe, **own.get(f, {})) for f in FAMILIES]
        if of_head:
            named = dataclasses.replace(recipe, name=f"{recipe.name}-said")
            said = {"has_own_lm_head": True}
            cases.append(_quantized(workshop, "beyond", "dflash", named, head=True, config=said))
    split = ("fp8-head", "int4-group128-head", "int4-fc")
    return [case if case.recipe in split else dataclasses.replace(case, tp=(1,)) for case in cases]


def _quantized(
    workshop: Workshop,
    kind: Kind,
    family: FamilyName,
    recipe: Recipe,
    config: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Case:
    name = f"{family}--{recipe.name}"
    case = Case(name, kind, family, recipe.summary, recipe.name, reads=READS[family])
    # AWQ stores float16: its drafts are made from float16 ones, and served in float16.
    dtype = "F16" if recipe.layout == "awq" else "BF16"
    keys = {"torch_dtype": DTYPES[dtype], **(config or {})}
    source = workshop.source(family, dtype=dtype, config=keys, **changes)
    try:
        workshop.quantize(source, recipe, name)
    except DraftQuantError as exc:
        # What is recorded names drafts, not where this run made them.
        said = str(exc).replace(f"{workshop.sources}/", "")
        return dataclasses.replace(case, refused=" ".join(said.split()))
    return case
