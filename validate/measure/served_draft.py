"""Is the draft that a server runs the one that `--draft` names? Its own words against the folder's.

Servers name their draft by a path of their own machine, or by a Hub id. So names may differ where
the draft is the same, and the other way round: what can be compared is, from the surest on.
"""

from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from ...quantize.errors import CheckpointError
from ...quantize.files.checkpoint import Checkpoint
from ...quantize.files.digests import has_identity
from ...recipes.errors import short
from ..errors import MeasureError
from .measurement import ServerIdentity, Speculation, ToldBy

_UNQUANTIZED = ("unquant", "none")
"""How engines say that a draft is not quantized; vLLM and SGLang say nothing where they do not
know, which is the rule."""
_NAMES_OF_THE_TARGET = ("root", "model_path")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftIdentity:
    """The draft that a server runs, as its folder says; the first three fields as in `Speculation`.

    Attributes:
        quantized: the folder declares a quantization; None = not known.
        folder: where it lies here; None = not known.
        served_as: what the server calls it, as the user says; None = as its folder is called.
    """

    draft: str
    draft_sha256: str
    draft_quantization: str | None
    quantized: bool | None = None
    folder: Path | None = None
    served_as: str | None = None


def identified(
    speculation: Speculation, draft: DraftIdentity, server: ServerIdentity
) -> Speculation:
    """How a server drafts, with the identity of the draft that it was said to run.

    Raises:
        MeasureError: the server tells of another one.
    """
    named = speculation.draft or None
    of_the_target = (server.model, *map(server.arguments.get, _NAMES_OF_THE_TARGET))
    in_the_target = named is not None and named in of_the_target
    # An MTP layer is a part of the target, whose name and quantization are what is told.
    told_by = _told_by(None if in_the_target else named, draft)
    if not in_the_target:
        _check_quantization(speculation, draft)
    return replace(
        speculation,
        draft=draft.draft,
        draft_sha256=draft.draft_sha256,
        draft_quantization=draft.draft_quantization,
        served_draft=speculation.draft,
        served_quantization=speculation.draft_quantization,
        told_by=told_by,
    )


def _told_by(named: str | None, draft: DraftIdentity) -> ToldBy | None:
    """See `Speculation`."""
    if draft.served_as is not None and draft.served_as != named:
        raise MeasureError(
            "--served-as",
            f"expected what the server calls its draft, {short(named)}, got"
            f" {short(draft.served_as)}",
            fix="copy the name as the server reports it, or leave it out",
        )
    if named is None:
        return None
    if draft.served_as is not None:
        return "user"
    here = _folder(named)
    if here is not None and draft.folder is not None:
        if here.samefile(draft.folder):
            return "path"
        if _has_tensors(here, draft.draft_sha256):
            return "tensors"
    elif _last_name(named) in _names(draft):
        return "name"
    raise MeasureError(
        "--draft",
        f"expected the draft that the server runs, {short(named)}, got {short(draft.draft)}"
        f" (tensors {draft.draft_sha256[:12]})",
        fix="give the draft that the server runs, or start the server with this one; if it is the"
        f" same by another name: --served-as {named}",
    )


def _folder(named: str) -> Path | None:
    """What is meant, where this machine has such a folder; the server may be another one."""
    try:
        return Path(named) if Path(named).is_dir() else None
    except OSError:  # too long for a path
        return None


def _has_tensors(folder: Path, sha256: str) -> bool:
    """Whether a folder holds a draft whose tensors have this identity."""
    try:
        return has_identity(Checkpoint.open(folder), sha256)
    except CheckpointError:
        return False


def _names(draft: DraftIdentity) -> set[str]:
    """By which a folder may go: its own, and that of the Hub's cache or of the id."""
    paths = [draft.draft] + ([] if draft.folder is None else [str(draft.folder)])
    return {_last_name(path) for path in paths}


def _last_name(path: str) -> str:
    """The last part of a path or a Hub id; of a path in the Hub's cache that of the repository."""
    parts = PurePosixPath(path).parts
    cached = [part for part in parts if part.startswith("models--")]
    return cached[-1].rpartition("--")[2] if cached else parts[-1] if parts else path


def _check_quantization(speculation: Speculation, draft: DraftIdentity) -> None:
    """The server quantizes what is stored plain, or reads as plain what is not."""
    told, called = speculation.draft_quantization, speculation.draft
    if told is None or draft.quantized is None:
        return
    if draft.quantized == (told.lower() in _UNQUANTIZED):
        raise MeasureError(
            "--draft",
            f"{short(draft.draft)} {'is' if draft.quantized else 'is not'} quantized, but the"
            f" server reports quantization {short(told)} for its"
            f" draft{f' {short(called)}' if called else ''}",
            fix="give the draft that the server runs, or leave --draft out",
        )
