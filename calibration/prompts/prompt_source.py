"""Prompts by what a user names: a file, or a data set of the Hub."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import LineProblem, PromptError
from ..traces.dataset_source import DatasetSource
from .forms import CONVERSATIONS, KNOWN_COLUMNS
from .hub_dataset import HubDataset, is_dataset, open_dataset
from .prompt_choice import EVERY_PROMPT, PromptChoice, of_column
from .prompt_file import Prompt, PromptEncoder, prompt_of, read_prompts

MOST_ROWS = 10_000
"""Of a data set, without --num-prompts."""
_MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPrompts:
    """Prompts, and where they come from.

    Attributes:
        prompts: at least one.
        dataset: that they were taken out of; None for a file.
        passed_over: rows of it that hold no prompt, each with its problem.
    """

    prompts: tuple[Prompt, ...]
    dataset: DatasetSource | None = None
    passed_over: tuple[str, ...] = ()


def prompts_of(
    reference: str | Path, encoder: PromptEncoder, choice: PromptChoice = EVERY_PROMPT
) -> ReadPrompts:
    """Read prompts of a file, or of a data set of the Hub where no such file can be meant.

    Args:
        reference: a file as of `read_prompts`, or owner/name[@revision].
        choice: which of the prompts.

    Raises:
        PromptError: the file or data set cannot be read, or holds too few prompts.
    """
    if not is_dataset(str(reference)):
        if choice.split is not None:
            what = f"belongs to a data set of the Hub, and {reference} is a file"
            raise PromptError("--prompts-split", what, fix="leave it out, or give OWNER/NAME")
        prompts = read_prompts(Path(reference), encoder=encoder, choice=choice)
        return ReadPrompts(prompts=prompts)
    found = open_dataset(str(reference), choice)
    if choice.num_prompts is None and len(found) > MOST_ROWS:
        raise PromptError(
            found.source,
            f"{len(found):,} rows, at most {MOST_ROWS:,} are taken without being asked for",
            fix="say how many: --num-prompts 200",
        )
    choice.check(found.source, len(found))
    kept = kept_columns(found, choice.column)
    table = found.table.select_columns(kept)
    good: dict[int, Prompt] = {}
    problems: list[str] = []
    for place in choice.order(len(found)):
        if len(good) == choice.num_prompts or (not good and len(problems) == _MOST_PROBLEMS):
            break
        try:
            row = known_part(table[place], choice.column)
            good[place] = prompt_of({**row, "id": f"row-{place}"}, place, encoder)
        except LineProblem as exc:
            problems.append(f"row {place}: {exc}")
    if not good:
        raise PromptError(
            found.source,
            "its rows are no prompts:",
            details=problems,
            fix="name the column that holds them: --prompts-column NAME",
        )
    choice.check(found.source, len(good))
    return ReadPrompts(
        prompts=tuple(good[place] for place in sorted(good)),
        dataset=found.source,
        passed_over=tuple(problems),
    )


def kept_columns(found: HubDataset, column: str | None) -> Sequence[str]:
    """The columns that a prompt is made of: no other one is unpacked.

    Raises:
        PromptError: there is none of them.
    """
    beside = [name for name in ("category", "cluster") if name in found.columns]
    if column is not None:
        if column in found.columns:
            return [column, *(name for name in beside if name != column)]
        what = f"no column {column!r}"
    else:
        for marks in KNOWN_COLUMNS:
            if marks[0] in found.columns:
                return [*(name for name in marks if name in found.columns), *beside]
        what = "none of its columns is known to hold prompts"
    columns = ", ".join(found.columns)
    raise PromptError(
        found.source,
        f"{what}; there are {columns}; known are {', '.join(marks[0] for marks in KNOWN_COLUMNS)}",
        fix="name the one that holds the prompts: --prompts-column NAME",
    )


def known_part(row: Mapping[str, Any], column: str | None) -> Mapping[str, Any]:
    """A row as a line of a file: what is null is absent, and conversations end with the user.

    Categories that are no text are no categories: many data sets number them.
    """
    there = {key: value for key, value in row.items() if value is not None}
    for name in ("category", "cluster"):
        if name != column and not isinstance(there.get(name), str):
            there.pop(name, None)
    if column is not None:
        return of_column(there, column)
    return {("conversations" if key in CONVERSATIONS else key): there[key] for key in there}
