"""The pictures of README and docs/, from measured figures and headers only."""

import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ....quantize.drafts import read_draft
from ....quantize.planning.quantization_plan import make_plan
from ....recipes import load_recipe
from ....recipes.formats import NUMBER_FORMATS
from ..real_shapes.drafts import DEFAULT_DRAFT, REAL_DRAFTS
from ..real_shapes.generate import write_sparse_model
from .acceptance import Change, measured_changes
from .drawing import BLUE, FAINT, GREEN, GRID, ORANGE, PAPER, PURPLE, RED, figure, house_look, svg

_LIMIT = -1.0
_KINDS = {(8, False): "FP8", (4, False): "INT4", (4, True): "FP4"}
"""(bits of a value, whether it is FP4) -> the common name for such weights."""
_LOOKS = {"PASS": ("o", GREEN), "INCONCLUSIVE": ("D", ORANGE), "FAIL": ("X", RED)}
_SIZED = ("fp8-ptpc", "mi325x-w4a8-fp8", "int4-channel", "int4-group128", "blackwell-nvfp4")
_PARTS = {
    "embedding and head": (("embedding", "head"), GRID),
    "fc, norms": (("fusion", "norm"), FAINT),
    "attention": (("attention",), BLUE),
    "MLP": (("mlp",), PURPLE),
}


@house_look()
def acceptance_picture() -> str:
    """Change of the acceptance length of each recipe on each shipped pair, bounds and limit."""
    groups = _groups()
    rows = [row for group in groups.values() for row in (None, *group.items())]
    pairs = list(next(iter(measured_changes().values())))
    made, axes = figure(10, 0.34 * len(rows) + 1.3, len(pairs), sharey=True, sharex=True)
    made.subplots_adjust(0.235, 1.05 / (0.34 * len(rows) + 1.3) * 0.5, 0.99, 0.9, wspace=0.06)
    for axis, pair in zip(axes, pairs, strict=True):
        axis.set_title(pair, fontsize=11, fontweight="bold", loc="left")
        axis.axvspan(-6, _LIMIT, color=RED, alpha=0.07, linewidth=0)
        axis.axvline(_LIMIT, color=RED, linewidth=1.2, linestyle=(0, (4, 3)))
        axis.axvline(0, color=FAINT, linewidth=1)
        for place, row in enumerate(rows):
            if row is not None:
                _draw(axis, place, row[1][pair])
        axis.set_xlim(-5.3, 1.6)
        axis.grid(axis="x", linewidth=0.6)
        axis.tick_params(length=0)
        axis.spines["left"].set_visible(False)
    axes[0].set_yticks(range(len(rows)), ["" if row is None else row[0] for row in rows])
    axes[0].set_ylim(len(rows) - 0.4, -0.6)
    for group, place in zip(groups, (i for i, row in enumerate(rows) if row is None), strict=True):
        axes[0].text(-0.02, place, group, transform=axes[0].get_yaxis_transform(), ha="right",
                     va="center", fontweight="bold", color=FAINT)  # fmt: skip
    axes[1].set_xlabel("change of the acceptance length, %; bars: one-sided 95 % bounds")
    for verdict, (marker, colour) in _LOOKS.items():
        axes[0].plot([], [], marker, color=colour, label=verdict, markersize=7.5)
    axes[0].plot([], [], color=RED, linestyle=(0, (4, 3)), label="limit of the gate, -1 %")
    made.legend(loc="upper center", ncols=4, frameon=False)
    return svg(made, "Change of the acceptance length by recipe on the three shipped pairs")


def _draw(axis: Any, place: int, each: Change) -> None:
    marker, colour = _LOOKS[each.verdict]
    axis.plot([each.lower, each.upper], [place, place], color=colour, linewidth=2.2)
    axis.plot([each.change], [place], marker, color=colour, markersize=7.5)


def _groups() -> dict[str, dict[str, Mapping[str, Change]]]:
    """Kind of weights -> recipes of one arithmetic, by worst lower bound -> pair -> change."""
    found: dict[str, dict[str, Mapping[str, Change]]] = {group: {} for group in _KINDS.values()}
    alike = _alike(measured_changes())
    for names in sorted(alike, key=lambda names: -min(c.lower for c in alike[names].values())):
        number = NUMBER_FORMATS[load_recipe(names.partition(",")[0].strip()).weights.dtype]
        found[_KINDS[number.bits, number.is_fp4]][names] = alike[names]
    return found


def _alike(changes: Mapping[str, Mapping[str, Change]]) -> dict[str, Mapping[str, Change]]:
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


PICTURES: Mapping[str, Callable[[], str]] = {
    "pictures/acceptance.svg": acceptance_picture,
    "pictures/bytes.svg": bytes_picture,
}
