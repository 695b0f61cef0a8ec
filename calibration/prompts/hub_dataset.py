"""Data sets of the Hugging Face Hub: one commit of one, fetched or found in the local cache.

huggingface_hub brings the files, as it does for drafts: what `hf download --repo-type dataset` has
left is found without a network. The package `datasets` reads them, and runs no code of theirs.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from logging import ERROR
from pathlib import Path
from typing import Any

from ...quantize.files.hub_id import is_hub_id
from ...recipes.errors import first_line
from ...recipes.install_line import install_line
from ..errors import PromptError
from ..traces.dataset_source import DatasetSource
from .prompt_choice import PromptChoice

_FILES = {".jsonl", ".json", ".parquet", ".csv", ".tsv", ".txt", ".gz", ".zip", ".arrow", ".yaml"}
"""Endings of names that are files, even where they do not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubDataset:
    """A split of a data set.

    Attributes:
        source: which one. table: its rows, as `datasets` has them.
    """

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
    """Fetch a data set, or find it in the local cache, and open a split of it.

    Args:
        reference: owner/name, or owner/name@revision.
        choice: of which split.

    Raises:
        PromptError: `datasets` is not installed, the Hub does not give the data set, or it has no
            such split.
    """
    datasets = _import_datasets(reference)
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
    """The one that is asked for, or the only one, or the usual one."""
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
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    reference = f"{name}@{revision}" if revision else name
    login = "'hf auth login', or put a token into HF_TOKEN"
    try:
        return Path(snapshot_download(name, repo_type="dataset", revision=revision or None))
    except GatedRepoError as exc:
        what, fix = "is gated: its owner decides who may read it", f"ask on its page, then {login}"
        raise PromptError(reference, what, fix=fix) from exc
    except RevisionNotFoundError as exc:
        what, fix = "the data set has no such revision", "give a branch, a tag or a commit's hash"
        raise PromptError(reference, what, fix=fix) from exc
    except RepositoryNotFoundError as exc:
        what = "no such file, and no data set of the Hub that you may read"
        fix = f"check the spelling; if the data set is private, {login}"
        raise PromptError(reference, what, fix=fix) from exc
    except LocalEntryNotFoundError as exc:
        raise PromptError(
            reference,
            "no such file, and the data set is not in the local cache of the Hub, which cannot be"
            " reached from here",
            fix=f"where there is a network: hf download {name} --repo-type dataset; or give a file",
        ) from exc
    except (HFValidationError, OSError) as exc:  # HTTP errors of the Hub are OSErrors
        first = str(exc).strip().partition("\n")[0] or type(exc).__name__
        raise PromptError(
            reference, f"no such file, and the Hub did not give it: {first}", fix="try again later"
        ) from exc


def _import_datasets(reference: str) -> Any:
    try:
        import datasets
    except ImportError as exc:
        what = "no such file; for data sets of the Hub the package datasets is not installed"
        raise PromptError(reference, what, fix=install_line("datasets")) from exc
    return datasets


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
        raise PromptError(
            reference,
            f"the package datasets cannot read it: {first}",
            fix="write its prompts into a file of JSON lines, and give that",
        ) from exc
