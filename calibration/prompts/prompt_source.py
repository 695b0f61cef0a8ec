"""Prompts by what a user names: a file, or a data set of the Hub, fetched or in the local cache.

huggingface_hub brings the files, as it does for drafts: what `hf download --repo-type dataset` has
left is found without a network. The package `datasets` reads them, and runs no code of theirs.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging import ERROR
from pathlib import Path
from typing import Any

from ...quantize.files.hub import is_hub_id
from ...recipes.errors import LineProblem, PromptError, first_line, refused
from ...recipes.installing import imported
from ...recipes.regular_file import AnyPath
from ..traces.manifest import DatasetSource
from .prompt_file import MOST_PROBLEMS, Prompt, PromptEncoder, prompt_of, read_prompts
from .prompt_forms import (
    CONVERSATIONS,
    EVERY_PROMPT,
    KNOWN_COLUMNS,
    ChosenPrompts,
    PromptChoice,
    of_column,
)

_FILES = {".jsonl", ".json", ".parquet", ".csv", ".tsv", ".txt", ".gz", ".zip", ".arrow", ".yaml"}
"""Endings of names that are files, even where they do not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubDataset:
    """A split of a data set."""

    source: DatasetSource
    table: Any

    @property
    def columns(self) -> Sequence[str]:
        """Their names, in order."""
        return tuple(self.table.column_names)

    def __len__(self) -> int:
        return len(self.table)


def is_dataset(reference: str) -> bool:
    """True for `owner/name` and `owner/name@revision`, where no such file can be meant."""
    path = Path(reference)
    meant = path.suffix.lower() in _FILES or path.exists() or path.parent.is_dir()
    return is_hub_id(reference) and not meant


def open_dataset(reference: str, choice: PromptChoice) -> HubDataset:
    """Fetch a data set, or find it in the local cache, and open a split of it."""
    what = "no such file; for data sets of the Hub the package datasets is not installed"
    datasets = imported("datasets", "datasets", reference, what, PromptError)
    name, _, revision = reference.partition("@")
    folder = _fetched(name, revision)
    with _errors_of(datasets, reference), _quiet(datasets):
        asked, _, split = (choice.split or "").rpartition("/")
        configs = datasets.get_dataset_config_names(str(folder))
        config = _one_of(configs, asked, reference, "config", "default")
        builder = datasets.load_dataset_builder(str(folder), config)
        builder.download_and_prepare()
        split = _one_of(tuple(builder.info.splits), split, f"{reference}, {config}", "split")
        table = builder.as_dataset(split=split)
    source = DatasetSource(
        name=name,
        revision=folder.name,
        config=config,
        split=split,
        column=choice.column,
        seed=None if choice.num_prompts is None else choice.seed,
    )
    return HubDataset(source=source, table=table)


def _one_of(known: Sequence[str], asked: str, where: str, what: str, usual: str = "") -> str:
    if asked in known:
        return asked
    if not asked and (len(known) == 1 or usual in known):
        return usual if usual in known else known[0]
    split = f"{known[0]}/SPLIT" if what == "config" and known else (*known, "SPLIT")[0]
    got = f"no {what} {asked!r}" if asked else f"{len(known)} {what}s, and none is named"
    names = ", ".join(known) or "none"
    raise PromptError(where, f"{got}; there are {names}", fix=f"name one: --prompts-split {split}")


def _fetched(name: str, revision: str) -> Path:
    """The folder of a commit, whose name is the commit's hash."""
    from huggingface_hub import errors, snapshot_download

    reference = f"{name}@{revision}" if revision else name
    login = "'hf auth login', or put a token into HF_TOKEN"
    try:
        return Path(snapshot_download(name, repo_type="dataset", revision=revision or None))
    except (errors.HFValidationError, OSError) as exc:  # HTTP errors of the Hub are OSErrors
        first = str(exc).strip().partition("\n")[0] or type(exc).__name__
        what, fix = f"no such file, and the Hub did not give it: {first}", "try again later"
        if isinstance(exc, errors.GatedRepoError):
            what = "is gated: its owner decides who may read it"
            fix = f"ask on its page, then {login}"
        elif isinstance(exc, errors.RevisionNotFoundError):
            what = "the data set has no such revision"
            fix = "give a branch, a tag or a commit's hash"
        elif isinstance(exc, errors.RepositoryNotFoundError):
            what = "no such file, and no data set of the Hub that you may read"
            fix = f"check the spelling; if the data set is private, {login}"
        elif isinstance(exc, errors.LocalEntryNotFoundError):
            what = (
                "no such file, and the data set is not in the local cache of the Hub, which cannot"
                " be reached from here"
            )
            fix = (
                f"where there is a network: hf download {name} --repo-type dataset; or give a file"
            )
        raise PromptError(reference, what, fix=fix) from exc


@contextlib.contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Without bars, since our own counts prompts, and without what cards lack."""
    from huggingface_hub.utils import logging

    had_bars, verbosity = not datasets.are_progress_bars_disabled(), logging.get_verbosity()
    datasets.disable_progress_bars()
    logging.set_verbosity(ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def _errors_of(datasets: Any, reference: str) -> Iterator[None]:
    """What `datasets` raises of files that it cannot read, as an error of ours."""
    try:
        yield
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as exc:
        first = first_line(exc)
        raise refused(PromptError, reference, __file__, "not-read", first=first) from exc


_MOST_NAMED = 3
MOST_ROWS = 10_000  # of a data set, without --num-prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPrompts:
    """Prompts, at least one, and the data set that they were taken out of; None for a file."""

    prompts: tuple[Prompt, ...]
    dataset: DatasetSource | None = None
    passed_over: tuple[str, ...] = ()


def prompts_of(
    reference: str | Path, encoder: PromptEncoder, choice: PromptChoice = EVERY_PROMPT
) -> ReadPrompts:
    """Read prompts of a file, or of a data set of the Hub where no such file can be meant."""
    if not is_dataset(str(reference)):
        if choice.split is not None:
            what = f"belongs to a data set of the Hub, and {reference} is a file"
            raise PromptError("--prompts-split", what, fix="leave it out, or give OWNER/NAME")
        prompts = read_prompts(Path(reference), encoder=encoder, choice=choice)
        return ReadPrompts(prompts=prompts)
    found = open_dataset(str(reference), choice)
    if choice.num_prompts is None and len(found) > MOST_ROWS:
        what = f"{len(found):,} rows, at most {MOST_ROWS:,} are taken without being asked for"
        raise PromptError(found.source, what, fix="say how many: --num-prompts 200")
    choice.check(found.source, len(found))
    kept = kept_columns(found, choice.column)
    table = found.table.select_columns(kept)
    good: dict[int, Prompt] = {}
    problems: list[str] = []
    for place in choice.order(len(found)):
        if len(good) == choice.num_prompts or (not good and len(problems) == MOST_PROBLEMS):
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
    """The columns that a prompt is made of: no other one is unpacked."""
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
    known = ", ".join(marks[0] for marks in KNOWN_COLUMNS)
    facts = {"what": what, "columns": ", ".join(found.columns), "known": known}
    raise refused(PromptError, found.source, __file__, "no-column", **facts)


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


def chosen_prompts(reference: AnyPath, encoder: PromptEncoder, asked: ChosenPrompts) -> ReadPrompts:
    """Read the prompts that are asked for, and warn of rows that are none."""
    read = prompts_of(Path(reference), encoder, asked.choice)
    if read.dataset is not None:
        asked.listener.note(f"{len(read.prompts)} prompts of {read.dataset}")
    if over := read.passed_over:
        named = "; ".join(over[:_MOST_NAMED])
        asked.listener.warning(f"{reference}: {len(over)} row(s) hold no prompt: {named}")
    return read
