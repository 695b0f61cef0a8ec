"""What a quantized folder declares in config.json: scheme, storage and excluded modules.

Reading is strict and uses no code of the writing side: a declaration that is not understood is an
error, never a guess. This package knows JSON, but no tensors and no layouts.
"""

import dataclasses

from ...drafts.unsupported import packed_by_mlx
from ...errors import DeclarationError
from ...files.checkpoint import Checkpoint
from ..layouts import HF_QUANT_CONFIG, READ_LAYOUTS, DeclaredScheme, StoredLayout, Strictness
from ..layouts.name_matching import check_patterns
from ..layouts.reader import ObjectReader
from ..layouts.unread import OTHER_WAY, UNREAD_METHODS
from .raw import Form, RawDeclaration, raw_declaration, written_declaration

__all__ = [
    "HF_QUANT_CONFIG",
    "DeclaredScheme",
    "Form",
    "RawDeclaration",
    "Strictness",
    "declared_scheme",
    "raw_declaration",
    "read_scheme",
    "written_declaration",
]

# Keys that say who made the folder or how values were found, never how to decode them.
_NO_MEANING = frozenset({"producer", "version", "quant_mode", "global_compression_ratio"})


def declared_scheme(
    checkpoint: Checkpoint, *, strictness: Strictness = "folder"
) -> DeclaredScheme | None:
    """Read what a folder declares; None where it declares nothing: nothing is quantized.

    Raises:
        VerifyError: the declaration says something that this reader does not understand, or two
            declarations of one folder disagree.
        CheckpointError: hf_quant_config.json is not readable as JSON.
    """
    packed = packed_by_mlx(checkpoint.tensors)
    if packed is not None:
        raise DeclarationError(checkpoint.folder, packed.what, fix=packed.fix)
    raw = raw_declaration(checkpoint)
    return None if raw is None else read_scheme(raw, strictness=strictness)


def read_scheme(
    raw: RawDeclaration, *, layout: StoredLayout | None = None, strictness: Strictness
) -> DeclaredScheme:
    """The one reader of declarations.

    Args:
        layout: read it as one of this layout, whatever it says; None = as its quant_method says.
        strictness: what must be understood.

    Raises:
        VerifyError: it says something else, or something more.
        CheckpointError: the file beside config.json is not readable as JSON.
    """
    keys = ObjectReader.of(raw.value, raw.where, raw.key, _NO_MEANING, strictness)
    if layout is None:
        _check_not_refused(raw)
        layout = READ_LAYOUTS[keys.choice("quant_method", *READ_LAYOUTS)]
    keys.skip("quant_method")
    scheme = dataclasses.replace(layout.read(keys), excludes=layout.excludes(keys))
    if strictness == "folder" and layout.side_file and raw.form != "side file":
        layout.side_file.check(raw.where.parent, scheme, raw.value)
    keys.finish()
    if strictness in ("folder", "declaration"):
        check_patterns(keys, scheme)
    return scheme


def _check_not_refused(raw: RawDeclaration) -> None:
    """Fail for a tool whose folders are known, and not read."""
    method = raw.value.get("quant_method") if isinstance(raw.value, dict) else None
    if isinstance(method, str) and (why := UNREAD_METHODS.get(method)):
        raise DeclarationError(
            raw.where,
            f"{raw.key}.quant_method: {method} is not read: {why}",
            fix=OTHER_WAY.format(method),
        )
