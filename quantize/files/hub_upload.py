"""Uploading a folder to the Hub: never over something else, and what arrived is compared.

huggingface_hub does the transport; its token is the one that it finds (HF_TOKEN, or what `hf auth
login` stored), and is never seen here but to keep it out of messages.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...recipes.regular_file import open_stream
from ..errors import CheckpointError, HubError
from .checkpoint import HIDDEN
from .command_line import without_tokens
from .files_of_folder import files_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_OF_THE_HUB = (".gitattributes",)  # made with every repository
_LONGEST = 400  # characters of an answer that are quoted
_AGAIN = "run the same command again: files that have arrived are not sent again"
_LOGIN = "run 'hf auth login', or set HF_TOKEN to a token with write access"


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """What is on the Hub now.

    Attributes:
        url: of the repository.
        commit: hash of the revision that holds these files.
        sent: files that were not there before.
    """

    url: str
    commit: str
    sent: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Content:
    """Hashes by which the Hub knows a file: of git's blob, and of what is stored beside git."""

    blob_sha1: str
    sha256: str


def upload_files(folder: Path) -> Mapping[str, int]:
    """The files of a folder that go to the Hub, with their bytes, by name.

    Raises:
        CheckpointError: one is no file of the folder, or is hidden (`.env`, `.gitignore`).
    """
    found = {}
    for file in files_of(folder, skip=lambda file: Path(file).parts[0] in HIDDEN):
        if any(part.startswith(".") for part in Path(file).parts) and file not in _OF_THE_HUB:
            raise CheckpointError(
                folder / file,
                "it is hidden: it may hold something private, or (.gitignore) keep files back",
                fix="move it out of this folder and out of the source's folder",
            )
        found[file] = (folder / file).stat().st_size
    return found


def upload(
    folder: Path, repository: str, *, private: bool, revision: str | None, overwrite: bool
) -> Upload:
    """Make the repository if there is none, and put the files of a folder there in one commit.

    An upload that was cut short goes on where it was. Where the repository holds other files, or
    other contents of these, nothing is sent.

    Args:
        folder: see `upload_files`.
        repository: owner/name.
        private: nobody else sees it; must be what a repository that exists already is.
        revision: branch, made if need be; None = main.
        overwrite: contents of files of the same name are replaced.

    Raises:
        HubError: no token, no right, no network; the repository is not as private as asked, or
            holds something else; something arrived otherwise than it was sent.
        CheckpointError: see `upload_files`.
    """
    from huggingface_hub import HfApi

    contents = {file: _content(folder / file) for file in upload_files(folder)}
    api = HfApi(library_name="draftquant")
    with _errors_of(repository):
        _check_token(repository)
        url = api.create_repo(repository, private=private, exist_ok=True)
        info = api.repo_info(repository)
        if bool(info.private) != private:
            is_, asked = ("private", "public") if info.private else ("public", "private")
            raise HubError(
                repository,
                f"exists and is {is_}, expected a {asked} one",
                fix=f"{'leave out' if info.private else 'add'} --public, or change it on the Hub",
            )
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        before = _differing(api, repository, revision, contents)
        _check_differing(repository, before, contents, overwrite=overwrite)
        parent = api.repo_info(repository, revision=revision).sha
        if before.absent or before.other:
            api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                revision=revision,
                parent_commit=parent,
                commit_message="Upload a quantized draft, verified",
                ignore_patterns=[f"{name}/**" for name in sorted(HIDDEN)],
            )
        after = _differing(api, repository, revision, contents)
        if after.absent or after.other:
            name = [*after.absent, *after.other][0]
            raise HubError(
                f"{repository}: {name}",
                "the file on the Hub differs from the file that was sent",
                fix=_AGAIN,
            )
        commit = api.repo_info(repository, revision=revision).sha
    return Upload(url=str(url), commit=str(commit), sent=(*before.absent, *before.other))


@dataclass(frozen=True, slots=True)
class _Differing:
    """Files of ours that are not there, that are there with other contents, and files of others."""

    absent: tuple[str, ...]
    other: tuple[str, ...]
    foreign: tuple[str, ...]


def _differing(
    api: "HfApi", repository: str, revision: str | None, contents: Mapping[str, _Content]
) -> _Differing:
    from huggingface_hub.hf_api import RepoFile

    tree = api.list_repo_tree(repository, recursive=True, revision=revision)
    there = {each.path: each for each in tree if isinstance(each, RepoFile)}

    def is_other(file: str, content: _Content) -> bool:
        found = there[file]
        if found.lfs is not None:
            return bool(found.lfs.sha256 != content.sha256)
        return bool(found.blob_id != content.blob_sha1)

    return _Differing(
        absent=tuple(file for file in contents if file not in there),
        other=tuple(f for f, each in contents.items() if f in there and is_other(f, each)),
        foreign=tuple(sorted(there.keys() - contents.keys() - set(_OF_THE_HUB))),
    )


def _check_differing(
    repository: str, found: _Differing, contents: Iterable[str], *, overwrite: bool
) -> None:
    if found.foreign:
        raise HubError(
            f"{repository}: {found.foreign[0]}",
            "it is in the repository but not in the folder, and engines read files by name",
            fix="give another repository or another branch (--revision), or remove it on the Hub",
        )
    replaced = [file for file in found.other if file not in _OF_THE_HUB]
    if replaced and not overwrite:
        raise HubError(
            f"{repository}: {replaced[0]}",
            f"its contents in the repository differ, as those of {len(replaced)} of"
            f" {len(list(contents))} files do",
            fix="pass --overwrite to replace them in a new commit, or give another"
            " repository or branch",
        )


def _check_token(repository: str) -> None:
    from huggingface_hub import get_token

    if get_token() is None:
        raise HubError(repository, "there is no token of the Hub", fix=_LOGIN)


@contextmanager
def _errors_of(repository: str) -> Iterator[None]:
    """What huggingface_hub raises, as errors with a remedy and without a token."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HfHubHTTPError

    # Of what it sends requests by: httpx in huggingface_hub 1, httpx2 in 2.
    client_error: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        yield
    except HfHubHTTPError as exc:
        status = exc.response.status_code
        what, fix = _ANSWERS.get(status, (f"the Hub answers with status {status}", _AGAIN))
        raise HubError(repository, f"{what}: {_said(exc, get_token())}", fix=fix) from exc
    except ValueError as exc:
        what = f"the Hub refuses the upload: {_said(exc, get_token())}"
        raise HubError(repository, what, fix="correct what the Hub's message names") from exc
    except RuntimeError as exc:  # of one file; its cause says why
        what = f"{_said(exc, get_token())} {_said(exc.__cause__ or exc, get_token())}"
        raise HubError(repository, what, fix=_AGAIN) from exc
    except (client_error, OSError) as exc:
        what = f"the Hub does not answer: {_said(exc, get_token())}"
        fix = f"check the network, HF_ENDPOINT and HF_HUB_OFFLINE; {_AGAIN}"
        raise HubError(repository, what, fix=fix) from exc


_ANSWERS = {
    401: ("the Hub does not know the token", _LOGIN),
    403: (
        "the token may not write there",
        "give a repository of your own or of an organization that you may write to, and a token"
        " with write access",
    ),
    404: ("there is no such repository or revision for this token", "check the spelling, and who"
          " may see it"),
    409: ("somebody else changes the repository", _AGAIN),
    412: ("the repository changed meanwhile, and nothing was committed", _AGAIN),
}  # fmt: skip


def _said(exc: BaseException, token: str | None) -> str:
    """An error on one line, in which no token is left."""
    text = " ".join(str(exc).split()) or type(exc).__name__
    return without_tokens(text.replace(token, "...") if token else text)[:_LONGEST]


def _content(path: Path) -> _Content:
    blob, whole = hashlib.sha1(usedforsecurity=False), hashlib.sha256()
    blob.update(b"blob %d\0" % path.stat().st_size)
    with open_stream(path) as stream:
        while block := stream.read(2**20):
            blob.update(block)
            whole.update(block)
    return _Content(blob.hexdigest(), whole.hexdigest())
