"""What draftquant does with the twenty most used drafts: `experiments/published.md`.

Usage: `.venv/bin/python tests/published_answers.py` writes the page anew; `test_published.py`
holds it. `wild/published.toml` has a row for each, `wild/drafts.json` its config.json and tensors.

Most columns are those of `wild_answers.py`. The others are asked here: the rope as it is read, the
gate, and what becomes of the draft in the maker's own format, written by a recipe of ours.
"""

import dataclasses
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import wild_answers as wild
from by_recipe import draft_of, planned, quantized
from draftquant.quantize.drafts.rope import Unreplayed, read_rope
from draftquant.quantize.engines.contract import TITLES
from draftquant.quantize.engines.plan_verdicts import planned_verdicts
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.making.dequantize_draft import dequantize_draft
from draftquant.quantize.making.transcode_draft import plan_transcoding, transcode_draft
from draftquant.recipes import DraftQuantError, Recipe, load_recipe
from draftquant.validate.judging.judgement import judge
from draftquant.validate.judging.policy import resolve_policy
from wild_answers import Answer, Answers
from wild_drafts import WildDraft, wild_drafts

ROWS_FILE = wild.TABLE_FILE.parent / "published.toml"
PAGE_FILE = ROWS_FILE.parents[2] / "experiments" / "published.md"
NOT_FOUND = "no config found"
GATED = "fp8-ptpc"
_WIDE, _NARROW = 128, 32
OTHER_LAYOUT = {"modelopt": "compressed-tensors", "quark": "compressed-tensors"}
HEAD = """# The twenty most used drafts, and what draftquant does with them

{found} of these {count} have a config.json that could be found. Of {these} the family is `unknown`.
`check` says UNKNOWN {unknown} times about the BF16 drafts, and {stored} times about them as their
makers store them. {replayed} are replayed and judged.

[Their rows](../tests/wild/published.toml) say where configs and claims are from. Only keys of
config.json, and names and shapes of tensors were taken. `tests/published_answers.py` computes every
answer and writes this page, with random weights in small folders and with headers alone in the real
sizes. [All published drafts](../tests/wild/README.md) have the same columns.

`fp8-ptpc` has the share of bytes that remains. The `stored` columns are about the maker's format,
as a recipe of ours writes it: what `check` predicts on each GPU, and whether `dequantize` and
`transcode` write it otherwise. `rope` has base, scaling and the rotated part as replay takes them;
both engines [read the same](engines/README.md). The scaling of DeepSeek V4 is that of compressed
layers, and its drafts have none: both engines leave it out (vLLM 0.33.0
`models/deepseek_v4/common/rope.py:31`, SGLang 0.5.23 `models/deepseek_v4.py:1178`, read). Numbers
refer to the messages below.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A row of published.toml, which says what its keys are."""

    name: str
    layout: str
    claim: str
    source: str
    date: date
    wild: str | None = None
    recipe: str | None = None
    layout_as: str | None = None
    divide: int = 32

    @property
    def draft(self) -> WildDraft | None:
        return next((each for each in wild_drafts() if each.name == self.wild), None)

    @property
    def stored_by(self) -> Recipe | None:
        """The recipe that writes the maker's format."""
        if self.recipe is None:
            return None
        recipe = load_recipe(self.recipe)
        changed: dict[str, Any] = {"layout": self.layout_as} if self.layout_as else {}
        return dataclasses.replace(recipe, backend="torch", **changed)


def published() -> tuple[Published, ...]:
    """The rows, in the order of the file."""
    rows = tomllib.loads(ROWS_FILE.read_text(encoding="utf-8"))["draft"]
    return tuple(Published(**row) for row in rows)


def ask(row: Published, work: Path) -> Answers | None:
    """What is asked of every draft of the list, and of those of this page; `work` is empty."""
    if (draft := row.draft) is None:
        return None
    found = wild.ask(draft, work)
    said = dict(found.said)
    real, small = work / "real", work / "small"
    said["rope"] = wild.said(_rope, real)
    said["gate"] = wild.said(_gate, small, work / "quantized", work / "gated")
    recipe = row.stored_by
    if recipe is not None:
        for engine in wild.ENGINES:
            said[f"stored, {engine}"] = wild.said(_stored, real, recipe, engine)
        whole = draft.write(work / "whole", divide=row.divide)
        said["stored, plain"] = wild.said(_plain, whole, recipe, work / "made")
    return dataclasses.replace(found, said=said)


def _rope(real: Path) -> Answer:
    """Base, scaling and rotated part, as replay takes them; what it cannot compute, in words."""
    draft = draft_of(real)
    config = draft.checkpoint.config
    inner = config.get("transformer_layer_config") or config.get("text_config") or config
    rope = draft.geometry.rope or read_rope(inner, "config.json", part=1.0)
    if isinstance(rope.scaling, Unreplayed):
        raise DraftQuantError("rope", rope.scaling.what, fix=rope.scaling.fix)
    words = [f"{rope.theta:g}"]
    scaling = rope.yarn or rope.scaling
    if scaling is not None:
        words.append(f"{type(scaling).__name__.lower()} {getattr(scaling, 'factor', ''):g}")
    if rope.part != 1:
        words.append(f"{rope.part:g} of a head")
    return Answer(True, ", ".join(words))


def _gate(small: Path, candidate: Path, traces: Path) -> Answer:
    judge(*wild.replayed((small, candidate), traces, tokens=60), resolve_policy("release"))
    return Answer(True, "judges")


def _stored(real: Path, recipe: Recipe, engine: str) -> Answer:
    verdicts = [v for v in planned_verdicts(planned(real, recipe)) if v.engine == engine]
    loads = [v.arch for v in verdicts if v.verdict == "LOADS"]
    if loads:
        return Answer(True, f"loads on {', '.join(map(str, loads))}")
    (first, *_) = verdicts
    return Answer(False, f"{first.verdict.lower()}: {first.error or TITLES[first.engine]}")


def _plain(small: Path, recipe: Recipe, made: Path) -> Answer:
    """Dequantized, and transcoded to another layout: both verify what they write."""
    if recipe.weights.group_size == _WIDE:  # the widths are divided, and so are their groups
        weights = dataclasses.replace(recipe.weights, group_size=_NARROW)
        recipe = dataclasses.replace(recipe, weights=weights)
    quantized(small, recipe, made)
    source = DraftSource(folder=made)
    dequantize_draft(source, made.with_name("plain"))
    other = OTHER_LAYOUT.get(recipe.layout, "quark")
    try:
        plan = plan_transcoding(source, other, target_layers=128)  # type: ignore[arg-type]
        transcode_draft(plan, made.with_name("transcoded"))
    except DraftQuantError as exc:
        return Answer(False, f"dequantized; not in {other}: {exc.what}; fix: {exc.fix}")
    return Answer(True, f"dequantized; {other}")


COLUMNS = (
    "inspect", "rope", GATED, "quantize", "replay", "gate", *wild.ENGINES,
    *(f"stored, {engine}" for engine in wild.ENGINES), "stored, plain",
)  # fmt: skip


def page(answers: Sequence[tuple[Published, Answers | None]]) -> str:
    """The text of published.md."""
    errors: dict[str, int] = {}
    lines = [HEAD.format(**figures(answers))]
    lines.append(f"| draft | {' | '.join(COLUMNS)} |")
    lines.append("|---" * (1 + len(COLUMNS)) + "|")
    for row, found in answers:
        if found is None:
            cells = [NOT_FOUND, *[""] * (len(COLUMNS) - 1)]
        else:
            said = [found.said.get(column) for column in COLUMNS]
            cells = ["" if each is None else wild.cell(each, errors) for each in said]
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    lines += ["", "## Messages", "", *(f"{n}. {text}" for text, n in errors.items())]
    lines += ["", "## What their makers say", ""]
    lines += ["| draft | stored | claim | from |", "|---|---|---|---|"]
    lines += [f"| {r.name} | {r.layout} | {r.claim} | {r.source}, {r.date} |" for r, _ in answers]
    return "\n".join(lines) + "\n"


def figures(answers: Sequence[tuple[Published, Answers | None]]) -> dict[str, int]:
    """What the head of the page counts."""
    asked = [found for _, found in answers if found is not None]
    return {
        "count": len(answers),
        "found": len(asked),
        "these": sum(found.said["inspect"].text.split(", ")[0] == "unknown" for found in asked),
        "unknown": sum(_unknown(found, engine) for found in asked for engine in wild.ENGINES),
        "stored": sum(_unknown(found, f"stored, {e}") for found in asked for e in wild.ENGINES),
        "replayed": sum(found.said["gate"].good for found in asked),
    }


def _unknown(found: Answers, column: str) -> bool:
    return column in found.said and found.said[column].text.startswith("unknown")


def ask_all() -> list[tuple[Published, Answers | None]]:
    """Ask about every row."""
    found = []
    for row in published():
        with tempfile.TemporaryDirectory() as work:
            found.append((row, ask(row, Path(work))))
    return found


if __name__ == "__main__":
    PAGE_FILE.write_text(page(ask_all()), encoding="utf-8")
