"""The table of experiments/engines.md: recipes on families in engines, loaded and predicted.

`experiments/run engines_page` rewrites it from results.json and `check`.
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from draftquant.quantize.gpus import gpu_name

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "engines.md"
sys.path.insert(0, str(HERE.parents[1] / "tests"))  # tiny.py and its kin

from cases import FAMILIES, Case, Workshop, recipe_cases  # noqa: E402
from predictions import predicted  # noqa: E402
from results import COLUMNS, ENGINE_NAMES, WORDS, Outcome, read_outcomes  # noqa: E402

_BEGIN = "<!-- written by experiments/engines/engines_page.py -->\n"
_END = "<!-- end of what experiments/engines/engines_page.py writes -->\n"
_LEGEND = """
Each cell shows what the engine did. `check` predicted {right} of these {all} outcomes (one and two
shards each){marked}. **wrong**: the engine accepted the draft without an error, and served it
wrongly. [RESULTS.md](../experiments/engines/RESULTS.md) has the engines' own errors, {others}
outcomes of other formats and of broken folders, and how the engines were run.
"""


class Place(NamedTuple):
    """Where a draft was loaded."""

    engine: str
    arch: str
    tp: int


Verdicts = Mapping[tuple[str, Place], str]
"""Name of a case, place -> verdict."""


def main() -> None:
    """Rewrite the page's table; see the module."""
    with tempfile.TemporaryDirectory() as temporary:
        written = with_table(PAGE.read_text(encoding="utf-8"), table(*predictions(Path(temporary))))
    PAGE.write_text(written, encoding="utf-8")


def predictions(folder: Path) -> tuple[list[Case], Verdicts]:
    """Every case of a built-in recipe, and what `check` says of it where it was loaded.

    Args:
        folder: an empty one, for the drafts.
    """
    cases = recipe_cases(Workshop(folder))
    names = {case.name for case in cases}
    return cases, {
        _key(outcome): predicted(folder / outcome["draft"], outcome).verdict
        for outcome in read_outcomes()
        if outcome["draft"] in names
    }


def table(cases: Sequence[Case], said: Verdicts) -> str:
    """The table and its legend, from `predictions`."""
    loaded = {_key(outcome): outcome["verdict"] for outcome in read_outcomes()}
    right = sum(loaded[key] in (verdict, "UNKNOWN") for key, verdict in said.items())
    header = " | ".join(f"{ENGINE_NAMES[engine]} {gpu_name(arch)}" for engine, arch in COLUMNS)
    lines = [f"| recipe | families | {header} |", f"|{'---|' * (len(COLUMNS) + 2)}"]
    lines += _rows(cases, loaded, said)
    legend = _LEGEND.format(
        right=right,
        all=len(said),
        marked="" if right == len(said) else "; ✗ marks the others, with its word",
        others=f"{len(loaded) - len(said):,}",
    )
    return "\n".join(lines) + "\n" + legend


def with_table(page: str, written: str) -> str:
    """The page with the table between its two marks replaced."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name}: expected the marks {_BEGIN.strip()} and {_END.strip()}")
    return f"{before}{_BEGIN}\n{written}\n{_END}{after}"


def _key(outcome: Outcome) -> tuple[str, Place]:
    return outcome["draft"], Place(outcome["engine"], outcome["arch"], outcome["tp"])


def _rows(cases: Sequence[Case], loaded: Verdicts, said: Verdicts) -> Iterator[str]:
    """One row for all families of a recipe that fare alike."""
    recipes = dict.fromkeys(case.recipe or "unquantized" for case in cases)
    for recipe in recipes:
        alike: dict[tuple[str, ...], list[str]] = {}
        for case in cases:
            if (case.recipe or "unquantized") == recipe:
                cells = tuple(_cell(case, column, loaded, said) for column in COLUMNS)
                alike.setdefault(cells, []).append(case.family)
        for cells, families in alike.items():
            names = "all" if len(families) == len(FAMILIES) else ", ".join(families)
            yield f"| `{recipe}` | {names} | {' | '.join(cells)} |"


def _cell(case: Case, column: tuple[str, str], loaded: Verdicts, said: Verdicts) -> str:
    if case.refused is not None:
        return "not written"
    shards = {
        tp: _words(loaded[case.name, Place(*column, tp)], said[case.name, Place(*column, tp)])
        for tp in case.tp
    }
    one = shards[case.tp[0]]
    return "; ".join([one, *(f"{tp} shards: {w}" for tp, w in shards.items() if w != one)])


def _words(loaded: str, said: str) -> str:
    word = WORDS[loaded]
    return word if loaded in (said, "UNKNOWN") else f"{word} ✗ {said}"


if __name__ == "__main__":
    main()
