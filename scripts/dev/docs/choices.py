"""Which recipe for which GPU, engine and family of draft, made from `check`.

Among the built-in recipes whose result `check` says LOADS and whose head is the draft's, a row has
the best in FP8, with weights in INT4 and with weights in FP4, by experiments/acceptance.md and by
bytes. By hand are only the GPUs that people use, and which of equal recipes is named.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from ....quantize.drafts import read_draft
from ....quantize.engines.contract import TITLES, EngineName
from ....quantize.engines.plan_verdicts import planned_verdicts
from ....quantize.engines.versions import ENGINES
from ....quantize.files.checkpoint import Checkpoint
from ....quantize.gpus import GPUS, architecture
from ....quantize.planning.quantization_plan import make_plan
from ....recipes import Recipe, built_in_recipes, load_recipe
from ....recipes.formats import NUMBER_FORMATS
from .. import PAIRS
from .acceptance import measured_changes
from .markdown import code, table

FAMILIES = ("eagle3-llama", "eagle3-mla", "dflash")
PLACES: Sequence[tuple[tuple[str, ...], EngineName]] = tuple(
    itertools.product(
        (("MI300X", "MI325X"), ("MI355X",), ("H100", "H200"), ("B200",)), ("vllm", "sglang")
    )
)
NAMED_FIRST = {
    "gfx942": "mi325x-fp8",
    "gfx950": "mi325x-fp8",
    "sm90": "fp8-ptpc",
    "sm100": "blackwell-fp8-mla",
}
"""Among recipes with the same arithmetic and bytes, the one that is named after the GPU."""
UNPACKED = "mi325x-w4a8-fp8"
"""What the plugin turns Quark's INT4 into while an engine loads it: it loads where this does."""
ANY = "any of the three"
NONE = "none"


class Choice(NamedTuple):
    """One row of advice.

    Attributes:
        gpus: as people say them.
        engine: that serves the draft.
        families: of drafts.
        fp8: the best recipe in FP8; None where none loads.
        int4: the best recipe with weights in INT4; None where none loads.
        by_plugin: `int4` loads only with draftquant as the engine's plugin.
        fp4: the best recipe with weights in FP4; None where none loads that passed on a pair.
    """

    gpus: tuple[str, ...]
    engine: EngineName
    families: tuple[str, ...]
    fp8: str | None
    int4: str | None
    by_plugin: bool
    fp4: str | None


def choices() -> tuple[Choice, ...]:
    """The advice for every place where the engine was executed; equal advice shares a row."""
    found = []
    for gpus, engine in PLACES:
        if architecture(gpus[0]) not in ENGINES[engine].gpus:
            continue
        rows: dict[tuple[str | None, str | None, bool, str | None], list[str]] = {}
        for family in FAMILIES:
            rows.setdefault(_advised(architecture(gpus[0]), engine, family), []).append(family)
        found += [Choice(gpus, engine, tuple(every), *best) for best, every in rows.items()]
    return tuple(found)


def choices_table() -> str:
    """The advice as a table."""
    return table(
        ["GPU", "engine", "family of the draft", "FP8", "INT4 weights", "FP4 weights"],
        (
            [
                f"{', '.join(each.gpus)} ({architecture(each.gpus[0])})",
                TITLES[each.engine],
                ANY if each.families == FAMILIES else ", ".join(each.families),
                code(each.fp8) if each.fp8 else NONE,
                _int4(each),
                code(each.fp4) if each.fp4 else NONE,
            ]
            for each in choices()
        ),
    )


def short_table() -> str:
    """The advice for drafts other than MLA: one row for GPUs and engines with equal advice."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for each in choices():
        if FAMILIES[0] in each.families:
            mark = "" if each.families == FAMILIES else " ²"
            four_bits = (
                each.int4 and code(each.int4) + (" ¹" if each.by_plugin else mark),
                each.fp4 and code(each.fp4) + mark,
            )
            cells = (TITLES[each.engine], each.fp8 and code(each.fp8), *four_bits)
            rows.setdefault(tuple(cell or NONE for cell in cells), []).extend(each.gpus)
    return table(
        ["GPU", "engine", "FP8", "INT4 weights", "FP4 weights"],
        ([", ".join(gpus), *cells] for cells, gpus in rows.items()),
    )


def _int4(choice: Choice) -> str:
    if choice.int4 is None:
        return NONE
    return code(choice.int4) + (" with the plugin" if choice.by_plugin else "")


def _advised(
    arch: str, engine: EngineName, family: str
) -> tuple[str | None, str | None, bool, str | None]:
    loading = _loading(family)
    here = [
        name
        for name, places in loading.items()
        if (engine, arch) in places and not _has_head(_recipe(name))
    ]
    fp8 = _best((name for name in here if _is_fp8(_recipe(name))), arch, family)
    small = [name for name in here if _is_small(_recipe(name), arch)]
    fp4 = _best((name for name in small if _is_fp4(name)), arch, family)
    int4 = _best((name for name in small if not _is_fp4(name)), arch, family)
    if int4 is not None or UNPACKED not in here:
        return fp8, int4, False, fp4
    unpacked = (name for name in loading if _recipe(name).is_for_the_plugin)
    return fp8, _best(unpacked, arch, family), True, fp4


def _has_head(recipe: Recipe) -> bool:
    """Whether it quantizes the head too: for a target's head that means nothing."""
    return any(rule.action == "quantize" and "head" in rule.role for rule in recipe.rules)


def _is_fp8(recipe: Recipe) -> bool:
    return recipe.weights.dtype == "fp8_e4m3"


def _is_small(recipe: Recipe, arch: str) -> bool:
    """Weights of four bits, stored in four bits, that the GPUs need not emulate."""
    number = NUMBER_FORMATS[recipe.weights.dtype]
    emulated = any(gpu.emulates(number) for gpu in GPUS.values() if gpu.arch == arch)
    return number.bits == 4 and recipe.weights.carrier is None and not emulated


def _is_fp4(name: str) -> bool:
    return NUMBER_FORMATS[_recipe(name).weights.dtype].is_fp4


def _best(names: Iterator[str], arch: str, family: str) -> str | None:
    """The first by measured acceptance and bytes; None where each failed on every pair."""
    passed = (name for name in names if _passed(name))
    return min(passed, key=_rank(arch, family), default=None)


def _rank(arch: str, family: str) -> Callable[[str], tuple[int, bool, int, bool, str]]:
    """By more pairs passed; no traces needed; smaller; named first; name."""

    def rank(name: str) -> tuple[int, bool, int, bool, str]:
        other = name != NAMED_FIRST[arch]
        return -_passed(name), needs_traces(_recipe(name)), _bytes(family)[name], other, name

    return rank


_recipe = cache(load_recipe)


def needs_traces(recipe: Recipe) -> bool:
    """Whether quantizing with it needs traces of the draft's prompts."""
    return recipe.needs_input_scales or recipe.algorithm.rounding != "nearest"


def _passed(name: str) -> int:
    """The number of shipped pairs on which the gate said PASS."""
    changes = measured_changes().get(name, {})
    return sum(change.verdict == "PASS" for change in changes.values())


@cache
def _planned(family: str) -> Mapping[str, tuple[int, frozenset[tuple[str, str | None]]]]:
    """Recipe -> bytes of its result, and the (engine, architecture) that load it."""
    draft = read_draft(Checkpoint.open(PAIRS / family / "draft"))
    found = {}
    for name in built_in_recipes():
        plan = make_plan(_recipe(name), draft)
        verdicts = planned_verdicts(plan, fix_config=True)
        places = frozenset((one.engine, one.arch) for one in verdicts if one.verdict == "LOADS")
        found[name] = (plan.bytes_after, places)
    return found


def _bytes(family: str) -> Mapping[str, int]:
    return {name: size for name, (size, _) in _planned(family).items()}


def _loading(family: str) -> Mapping[str, frozenset[tuple[str, str | None]]]:
    return {name: places for name, (_, places) in _planned(family).items()}
