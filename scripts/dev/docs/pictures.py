"""The pictures of README and docs/, from choices, measured figures and headers alone."""

import re
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ....quantize.drafts import read_draft
from ....quantize.quantization_plan import make_plan
from ....recipes import load_recipe
from ....recipes.regular_file import read_text
from .. import ROOT
from ..real_shapes.drafts import DEFAULT_DRAFT, REAL_DRAFTS
from ..real_shapes.generate import write_sparse_model
from .choices import ANY, CHOICES, EVERY, NONE_SMALLER, Choice, with_plugin
from .drawing import (
    BLUE,
    FAINT,
    GREEN,
    GRID,
    INK,
    ORANGE,
    PAPER,
    PURPLE,
    RED,
    figure,
    house_look,
    svg,
)

ACCEPTANCE = ROOT / "docs" / "acceptance.md"
_LIMIT = -1.0
_CELL = re.compile(
    r"[\d.]+, ([-+][\d.]+) % \(([-+][\d.]+), ([-+][\d.]+)\) (PASS|FAIL|INCONCLUSIVE)"
)
_LOOKS = {"PASS": ("o", GREEN), "INCONCLUSIVE": ("D", ORANGE), "FAIL": ("X", RED)}
_SIZED = ("fp8-ptpc", "mi325x-w4a8-fp8", "int4-channel", "int4-group128", "blackwell-nvfp4")
_PARTS = {
    "embedding and head": (("embedding", "head"), GRID),
    "fc, norms": (("fusion", "norm"), FAINT),
    "attention": (("attention",), BLUE),
    "MLP": (("mlp",), PURPLE),
}


class Change(NamedTuple):
    """One cell of the table of acceptance: a change with its one-sided bounds, in percent."""

    change: float
    lower: float
    upper: float
    verdict: str


def measured_changes() -> dict[str, dict[str, Change]]:
    """Recipe -> pair -> change, of the table in docs/acceptance.md."""
    lines = read_text(ACCEPTANCE).splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    pairs = next(row[1:] for row in rows if row[0] == "recipe")
    found: dict[str, dict[str, Change]] = {}
    for name, *cells in rows:
        changes = [_CELL.fullmatch(cell) for cell in cells]
        if changes and all(changes):
            values = [match.groups() for match in changes if match]
            found[name] = {
                pair: Change(float(change), float(lower), float(upper), verdict)
                for pair, (change, lower, upper, verdict) in zip(pairs, values, strict=True)
            }
    return found


@house_look()
def acceptance_picture() -> str:
    """Change of the acceptance length of each recipe on each shipped pair, bounds and limit."""
    alike = _alike(measured_changes())
    names = sorted(alike, key=lambda name: -sum(each.change for each in alike[name].values()))
    pairs = list(alike[names[0]])
    made, axes = figure(10, 6.8, len(pairs), sharey=True, sharex=True, layout="constrained")
    for axis, pair in zip(axes, pairs, strict=True):
        axis.set_title(pair, fontsize=11, fontweight="bold", loc="left")
        axis.axvspan(-6, _LIMIT, color=RED, alpha=0.07, linewidth=0)
        axis.axvline(_LIMIT, color=RED, linewidth=1.2, linestyle=(0, (4, 3)))
        axis.axvline(0, color=FAINT, linewidth=1)
        for place, name in enumerate(names):
            each = alike[name][pair]
            marker, colour = _LOOKS[each.verdict]
            axis.plot([each.lower, each.upper], [place, place], color=colour, linewidth=2.2)
            axis.plot([each.change], [place], marker, color=colour, markersize=7.5)
        axis.set_xlim(-5.3, 1.6)
        axis.grid(axis="x", linewidth=0.6)
        axis.tick_params(length=0)
        axis.spines["left"].set_visible(False)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    axes[1].set_xlabel("change of the acceptance length, %; bars: one-sided 95 % bounds")
    for verdict, (marker, colour) in _LOOKS.items():
        axes[0].plot([], [], marker, color=colour, label=verdict, markersize=7.5)
    axes[0].plot([], [], color=RED, linestyle=(0, (4, 3)), label="limit of the gate, -1 %")
    made.legend(loc="outside upper center", ncols=4, frameon=False)
    return svg(made, "Change of the acceptance length by recipe on the three shipped pairs")


def _alike(changes: Mapping[str, dict[str, Change]]) -> dict[str, dict[str, Change]]:
    """Recipes of one arithmetic, which accept the same tokens, as one row with all names."""
    names: dict[str, list[str]] = {}
    for name, each in changes.items():
        names.setdefault(str(each), []).append(name)
    return {
        textwrap.fill(", ".join(alike), 24, break_on_hyphens=False): changes[alike[0]]
        for alike in names.values()
    }


def planned_bytes() -> dict[str, Counter[str]]:
    """BF16 and recipes -> part of the published shape of kimi-k2.5-eagle3 -> bytes."""
    with tempfile.TemporaryDirectory() as temporary:
        config = REAL_DRAFTS[DEFAULT_DRAFT].config()
        shapes = REAL_DRAFTS[DEFAULT_DRAFT].shapes(config)
        draft = read_draft(write_sparse_model(Path(temporary) / "draft", config, shapes))
        found: dict[str, Counter[str]] = {"BF16": Counter()}
        for row in draft.rows:
            found["BF16"][_part(row.role)] += row.tensor.nbytes
        for name in _SIZED:
            found[name] = Counter()
            for step in make_plan(load_recipe(name), draft).steps:
                found[name][_part(step.row.role)] += step.bytes_after
    return found


def _part(role: str) -> str:
    return next(part for part, (roles, _) in _PARTS.items() if role in roles)


@house_look()
def bytes_picture() -> str:
    """What a published draft weighs, by recipe and part."""
    found = planned_bytes()
    made, (axis,) = figure(10, 3.6, layout="constrained")
    for place, parts in enumerate(found.values()):
        start = 0.0
        for part, (_, colour) in _PARTS.items():
            width = parts[part] / 1e9
            axis.barh(
                place,
                width,
                left=start,
                height=0.66,
                color=colour,
                edgecolor=PAPER,
                label=part if place == 0 else None,
            )
            start += width
        layers = (parts["attention"] + parts["MLP"]) / 1e9
        axis.text(start + 0.05, place, f"{start:.2f} GB, layers {layers:.2f}", va="center")
    axis.set_yticks(range(len(found)), list(found))
    axis.invert_yaxis()
    axis.set_xlim(0, 8)
    axis.set_xlabel(f"GB stored, {REAL_DRAFTS[DEFAULT_DRAFT].repository} (draftquant plan)")
    axis.tick_params(length=0)
    axis.spines["left"].set_visible(False)
    axis.grid(axis="x", linewidth=0.6)
    axis.set_axisbelow(True)
    made.legend(loc="outside upper center", ncols=4, frameon=False)
    return svg(made, "Bytes of kimi-k2.5-eagle3 in BF16 and by recipe")


_FP8 = "begin with: FP8"
_COLUMNS = {"GPU": 0.0, "engine": 1.9, "family": 3.0, _FP8: 5.4, "smaller: 4-bit weights": 7.1}


@house_look()
def choices_picture() -> str:
    """From GPU over engine and family to recipes, as a tree from left to right."""
    made, (axis,) = figure(10.4, 5.2)
    made.subplots_adjust(0, 0, 1, 1)
    axis.set_axis_off()
    axis.set_xlim(-0.15, 10.5)
    axis.set_ylim(len(CHOICES) - 0.3, -1.1)
    for heading, left in _COLUMNS.items():
        axis.text(left, -0.85, heading, color=FAINT, fontweight="bold", va="center")
    for place, choice in enumerate(CHOICES):
        for left, right, text, first in _boxes(choice, place):
            if first is not None:
                _box(axis, left, right, first, place, text)
    return svg(made, "Which recipe for which GPU, engine and family of draft")


def _boxes(choice: Choice, place: int) -> Iterator[tuple[float, float, str, int | None]]:
    """Left, right, text, and the first row that it spans where it ends in this one."""
    lefts = [*_COLUMNS.values()]
    family = ANY if choice.families == EVERY else ", ".join(choice.families)
    gpus = " ".join(choice.gpus)
    smaller = "\n".join(map(with_plugin, choice.smaller)) or NONE_SMALLER
    texts = [gpus, choice.engine, family, choice.recipe, smaller]
    keys: list[Callable[[Choice], Any]] = [
        lambda each: each.gpus,
        lambda each: (each.gpus, each.engine),
    ]
    for column, (left, text) in enumerate(zip(lefts, texts, strict=True)):
        right = [*lefts, 10.45][column + 1] - 0.2
        if column >= len(keys):
            yield left, right, text, place
            continue
        key = keys[column]
        last = place + 1 == len(CHOICES) or key(CHOICES[place + 1]) != key(choice)
        rows = [i for i, each in enumerate(CHOICES) if key(each) == key(choice)]
        yield left, right, text, rows[0] if last else None


def _box(axis: Any, left: float, right: float, first: int, last: int, text: str) -> None:
    top, height = first - 0.42, last - first + 0.84
    recipe = left >= _COLUMNS[_FP8] and text != NONE_SMALLER
    axis.add_patch(_rectangle(left, top, right - left, height, GREEN if recipe else GRID))
    axis.text(
        left + 0.1,
        top + height / 2,
        text,
        va="center",
        color=INK if text != NONE_SMALLER else FAINT,
        fontsize=10,
    )


def _rectangle(left: float, top: float, width: float, height: float, colour: str) -> Any:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.08"
    return FancyBboxPatch(
        (left, top), width, height, boxstyle=style, facecolor=PAPER, edgecolor=colour, linewidth=1.4
    )


PICTURES: Mapping[str, Callable[[], str]] = {
    "pictures/choices.svg": choices_picture,
    "pictures/acceptance.svg": acceptance_picture,
    "pictures/bytes.svg": bytes_picture,
}
