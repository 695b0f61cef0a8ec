"""Where a draft comes from: a local folder, or a Hugging Face Hub id pinned to a revision."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from ...recipes.errors import CheckpointError
from .checkpoint import Checkpoint, mistaken_file, near_folder

Reference = str | Path
"""A draft: its folder, or its id on the Hub (owner/name, owner/name@revision)."""
NAMES = r"[\w][\w.-]*/[\w][\w.-]*"
"""Owner and name."""
_HUB_ID = re.compile(rf"{NAMES}(@[\w./-]+)?")


def is_hub_id(reference: str) -> bool:
    """True for `owner/name` and `owner/name@revision`."""
    return _HUB_ID.fullmatch(reference) is not None


_FETCH = "check the spelling and the network, or download the draft and give its folder"
_ONLINE = "unset HF_HUB_OFFLINE and check the spelling, or download the draft and give its folder"
_ADDRESS = re.compile(
    rf"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co|hf:/)/({NAMES})(?:/\w+/([\w.-]+))?.*"
)
_SIDE_FILES = ["*.json", "*.jinja"]
"""Files by which a target is compared where its weights are not fetched."""
_COLON = re.compile(rf"({NAMES}):([\w./-]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """A draft on this disk, or layers below `subtree` in a target; a Hub id has a commit."""

    folder: Path
    hub_id: str | None = None
    revision: str | None = None
    subtree: str | None = None

    def checkpoint(self) -> Checkpoint:
        """Read config, index and headers."""
        return Checkpoint.open(self.folder, subtree=self.subtree)


def resolve_draft(reference: str, subtree: str | None = None) -> DraftSource:
    """Find a draft: a folder wins, else `owner/name[@revision]` is fetched from the Hub."""
    folder = Path(reference)
    if folder.exists() or not is_hub_id(reference):
        if folder.is_dir():
            return DraftSource(folder=folder, subtree=subtree and subtree.removesuffix("."))
        what, fix = mistaken_file(folder) if folder.exists() else _no_folder(reference)
        raise CheckpointError(reference, what, fix=fix)
    if subtree is not None:
        all_shards = "for one layer of a target on the Hub all its shards would be downloaded"
        fix = "download config.json, the index and the shards of the layer, and give the folder"
        raise CheckpointError(reference, f"there is no such folder, and {all_shards}", fix=fix)
    return _download(reference)


def folder_of(reference: Reference) -> Path:
    """The folder of a draft; raises like `resolve_draft`."""
    return resolve_draft(str(reference)).folder


def resolve_target(reference: str) -> Path:
    """The folder of a target; from a Hub id only JSON and text are fetched, no weights."""
    folder = Path(reference)
    if folder.is_dir():
        return folder
    if folder.exists() or not is_hub_id(reference):
        fix = "give the local folder of the target, or its Hub id (owner/name)"
        raise CheckpointError(reference, "no such folder, and no Hub id", fix=fix)
    return _download(reference, _SIDE_FILES).folder


def no_target(folder: Path) -> str:
    """What to do about a target without config.json, which may be an id on the Hub."""
    if folder.exists() or not is_hub_id(str(folder)):
        return "give the local folder of the target, with config.json"
    hub_id, _, revision = str(folder).partition("@")
    at = f" --revision {revision}" if revision else ""
    return f"targets are not downloaded: hf download {hub_id}{at} --local-dir T, then --target T"


def _no_folder(reference: str) -> tuple[str, str]:
    folder = Path(reference)
    if folder.is_symlink():
        where = folder.readlink()
        return f"is a link to {where}, which does not exist", "give another folder, or restore it"
    if address := _ADDRESS.fullmatch(reference):
        hub_id = "@".join(filter(None, address.groups()))
        return "is a web address, not a folder", f"give the Hub id: {hub_id}"
    if colon := _COLON.fullmatch(reference):
        what = "no such folder, and no Hub id (owner/name@revision)"
        return what, f"write the revision behind @: {colon[1]}@{colon[2]}"
    near = near_folder(folder)
    fix = f"did you mean {near}?" if near else "give a draft folder or a Hub id (owner/name)"
    return "no such folder", fix


def _download(reference: str, patterns: list[str] | None = None) -> DraftSource:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    hub_id, _, revision = reference.partition("@")
    try:
        fetched = snapshot_download(hub_id, revision=revision or None, allow_patterns=patterns)
        folder = Path(fetched)
    except (HFValidationError, OSError) as exc:  # HTTP errors of the Hub are OSErrors
        near = near_folder(Path(reference))
        first = str(exc).strip().partition("\n")[0] or type(exc).__name__
        reason = re.sub(r"\[Errno -?[0-9]+\] ", "", first)
        offline = constants.HF_HUB_OFFLINE and isinstance(exc, LocalEntryNotFoundError)
        what = "HF_HUB_OFFLINE forbids a download" if offline else "the Hub did not deliver it"
        what = f"there is no such folder, and {what}: {reason}"
        fix = f"did you mean {near}?" if near else _ONLINE if offline else _FETCH
        raise CheckpointError(reference, what, fix=fix) from exc
    return DraftSource(folder=folder, hub_id=hub_id, revision=folder.name)


# Of a command line, provenance keeps what was asked for, not where it was on some machine: equal
# runs in different folders give equal records.

_LEFT_OUT = {
    "--out": "--o", "--report": "--rep", "--html": "--ht", "--markdown": "--mar", "--junit": "--ju",
    "--plot": "--pl", "--token": "--to",
}  # fmt: skip
"""Options that are left out with their value -> the shortest spelling that argparse accepts."""
_TOKEN = re.compile(r"hf_[A-Za-z0-9]{8,}")


_RUNNING: ContextVar[tuple[str, ...]] = ContextVar("command line", default=())


@contextmanager
def command_line(argv: Sequence[str]) -> Iterator[None]:
    """Everything made inside the block records this command line."""
    token = _RUNNING.set(tuple(argv))
    try:
        yield
    finally:
        _RUNNING.reset(token)


def running_argv() -> tuple[str, ...]:
    """The running command line; empty where Python called."""
    return _RUNNING.get()


def recorded_argv(argv: Iterable[str]) -> tuple[str, ...]:
    """Arguments with names for paths, without outputs; a Hub id stays whole, a token is removed."""
    return tuple(_recorded(iter(argv)))


def _recorded(argv: Iterator[str]) -> Iterator[str]:
    for argument in argv:
        option, assigns, value = argument.partition("=")
        if not option.startswith("--"):
            yield _named(argument)
        elif any(n.startswith(option) and len(option) >= len(s) for n, s in _LEFT_OUT.items()):
            if not assigns:
                next(argv, None)
        else:
            yield f"{option}={_named(value)}" if assigns else _named(option)


def _named(argument: str) -> str:
    is_path = "/" in argument and (Path(argument).exists() or not is_hub_id(argument))
    return _TOKEN.sub("hf_...", Path(argument).name if is_path else argument)
