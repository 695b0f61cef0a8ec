"""Prompts by what a user names: a file, or a data set of the Hub, fetched or in the local cache.

huggingface_hub fetches the files, as it does for drafts: what `hf download --repo-type dataset` has
left is found without a network. The package `datasets` reads them, and runs none of their code.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging import ERROR
from pathlib import Path
from typing import Any

from ...quantize.files.hub import is_hub_id
from ...recipes.brief import counted
from ...recipes.errors import LineProblem, PromptError, first_line
from ...recipes.installing import imported
from ...recipes.regular_file import AnyPath
from ..traces.manifest import DatasetSource
from .prompt_file import MOST_PROBLEMS, Prompt, PromptEncoder, prompt_of, read_prompts
from .prompt_forms import CONVERSATIONS, EVERY_PROMPT, KNOWN_COLUMNS, ChosenPrompts, of_column

_FILES = {".jsonl", ".json", ".parquet", ".csv", ".tsv", ".txt", ".gz", ".zip", ".arrow", ".yaml"}
"""Endings that mark a name as a file, even where the file does not exist."""


def is_dataset(reference: str) -> bool:
    """True for `owner/name` and `owner/name@revision`, where no such file can be meant."""
    path = Path(reference)
    meant = path.suffix.lower() in _FILES or path.exists() or path.parent.is_dir()
    return is_hub_id(reference) and not meant


def open_dataset(reference: str, asked: ChosenPrompts) -> tuple[DatasetSource, Any]:
    """Fetch a data set, or find it in the local cache, and open the table of one of its splits."""
    what = "no such file; for data sets of the Hub the package datasets is not installed"
    datasets = imported("datasets", "datasets", reference, what, PromptError)
    name, _, revision = reference.partition("@")
    folder = _fetched(name, revision)
    with _quiet(datasets, reference):
        config, _, split = (asked.prompts_split or "").rpartition("/")
        configs = datasets.get_dataset_config_names(str(folder))
        config = _one_of(configs, config, reference, "config", "default")
        builder = datasets.load_dataset_builder(str(folder), config)
        builder.download_and_prepare()
        split = _one_of(tuple(builder.info.splits), split, f"{reference}, {config}", "split")
        table = builder.as_dataset(split=split)
    source = DatasetSource(
        name=name,
        revision=folder.name,
        config=config,
        split=split,
        column=asked.prompts_column,
        seed=None if asked.num_prompts is None else asked.prompts_seed,
    )
    return source, table


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
    """The folder of a commit, named by the commit's hash."""
    from huggingface_hub import errors, snapshot_download

    login = "'hf auth login', or put a token into HF_TOKEN"
    known = (
        (errors.GatedRepoError, "is gated: its owner decides who may read it",
         f"ask on its page, then {login}"),
        (errors.RevisionNotFoundError, "the data set has no such revision",
         "give a branch, a tag or a commit's hash"),
        (errors.RepositoryNotFoundError, "no such file, and no data set of the Hub that you may"
         " read", f"check the spelling; if the data set is private, {login}"),
        (errors.LocalEntryNotFoundError, "no such file, and the data set is not in the local cache"
         " of the Hub, which cannot be reached from here",
         f"where there is a network: hf download {name} --repo-type dataset; or give a file"),
    )  # fmt: skip
    try:
        return Path(snapshot_download(name, repo_type="dataset", revision=revision or None))
    except (errors.HFValidationError, OSError) as exc:  # HTTP errors of the Hub are OSErrors
        first = str(exc).strip().partition("\n")[0] or type(exc).__name__
        what, fix = next(
            ((what, fix) for kind, what, fix in known if isinstance(exc, kind)),
            (f"no such file, and the Hub did not give it: {first}", "try again later"),
        )
        raise PromptError(f"{name}@{revision}" if revision else name, what, fix=fix) from exc


@contextlib.contextmanager
def _quiet(datasets: Any, reference: str) -> Iterator[None]:
    """Silence bars, since our own counts prompts, and warnings about cards.

    Errors of `datasets` for files that it cannot read become draftquant errors.
    """
    from huggingface_hub.utils import logging

    had_bars, verbosity = not datasets.are_progress_bars_disabled(), logging.get_verbosity()
    datasets.disable_progress_bars()
    logging.set_verbosity(ERROR)
    try:
        yield
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as exc:
        first = first_line(exc)
        raise PromptError(
            reference,
            f"the package datasets cannot read it: {first}",
            fix="write its prompts into a file of JSON lines, and give that",
        ) from exc
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            datasets.enable_progress_bars()


_MOST_NAMED = 3
MOST_ROWS = 10_000  # of a data set, without --num-prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPrompts:
    """Prompts, at least one, and the data set that they were taken from; None for a file."""

    prompts: tuple[Prompt, ...]
    dataset: DatasetSource | None = None


def chosen_prompts(
    reference: AnyPath, encoder: PromptEncoder, asked: ChosenPrompts = EVERY_PROMPT
) -> ReadPrompts:
    """Read prompts of a file, or of a data set of the Hub where no such file can be meant.

    Warns of rows of a data set that are not prompts.
    """
    if not is_dataset(str(reference)):
        if asked.prompts_split is not None:
            what = f"belongs to a data set of the Hub, and {reference} is a file"
            raise PromptError("--prompts-split", what, fix="leave it out, or give OWNER/NAME")
        return ReadPrompts(prompts=read_prompts(Path(reference), encoder=encoder, choice=asked))
    source, table = open_dataset(str(reference), asked)
    count, wanted = len(table), asked.num_prompts
    if wanted is None and count > MOST_ROWS:
        what = f"{count:,} rows, at most {MOST_ROWS:,} are taken without being asked for"
        raise PromptError(source, what, fix="say how many: --num-prompts 200")
    asked.taken(source, count)
    column = asked.prompts_column
    table = table.select_columns(_kept_columns(source, table.column_names, column))
    good: dict[int, Prompt] = {}
    problems: list[str] = []
    for place in asked.order(count):
        if len(good) == wanted or (not good and len(problems) == MOST_PROBLEMS):
            break
        try:
            row = _known_part(table[place], column)
            good[place] = prompt_of({**row, "id": f"row-{place}"}, place, encoder)
        except LineProblem as exc:
            problems.append(f"row {place}: {exc}")
    if not good:
        raise PromptError(
            source,
            "its rows are no prompts:",
            details=problems,
            fix="name the column that holds them: --prompts-column NAME",
        )
    asked.taken(source, len(good))
    asked.listener.note(f"{counted(len(good), 'prompt')} of {source}")
    if problems:
        named = "; ".join(problems[:_MOST_NAMED])
        asked.listener.warning(f"{reference}: {len(problems)} row(s) hold no prompt: {named}")
    return ReadPrompts(prompts=tuple(good[place] for place in sorted(good)), dataset=source)


def _kept_columns(
    source: DatasetSource, columns: Sequence[str], column: str | None
) -> Sequence[str]:
    """The columns that make a prompt: no others are unpacked."""
    beside = [name for name in ("category", "cluster") if name in columns]
    if column is not None:
        if column in columns:
            return [column, *(name for name in beside if name != column)]
        what = f"no column {column!r}"
    else:
        for marks in KNOWN_COLUMNS:
            if marks[0] in columns:
                return [*(name for name in marks if name in columns), *beside]
        what = "none of its columns is known to hold prompts"
    known = ", ".join(marks[0] for marks in KNOWN_COLUMNS)
    raise PromptError(
        source,
        f"{what}; there are {', '.join(columns)}; known are {known}",
        fix="name the one that holds the prompts: --prompts-column NAME",
    )


def _known_part(row: Mapping[str, Any], column: str | None) -> Mapping[str, Any]:
    """A row as a line of a file: null means absent, and conversations end with the user.

    Categories that are not text do not count: many data sets number them.
    """
    there = {key: value for key, value in row.items() if value is not None}
    for name in ("category", "cluster"):
        if not isinstance(there.get(name), str):
            there.pop(name, None)
    if column is not None:
        return of_column(there, column)
    return {("conversations" if key in CONVERSATIONS else key): there[key] for key in there}
