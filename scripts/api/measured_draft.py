"""Who a draft is that a server runs, or that counts are of: its name and its tensors' identity."""

from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.files.hub import resolve_draft
from .references import Reference

if TYPE_CHECKING:
    from ...validate.measure.served_draft import DraftIdentity


def draft_identity(reference: Reference, served_as: str | None = None) -> "DraftIdentity":
    """A draft's identity, as the gate knows it, and what its server calls it."""
    from ...validate.judging.candidate_origin import DraftFolder
    from ...validate.measure.served_draft import DraftIdentity

    folder = DraftFolder.read(resolve_draft(str(reference)).folder)
    quantization = "of another tool" if folder.quantized else "none"
    if folder.quantized_by is not None:
        quantization = folder.quantized_by.recipe.name
    given = Path(reference)
    return DraftIdentity(
        draft=given.resolve().name if given.is_dir() else str(reference),
        draft_sha256=folder.sha256,
        draft_quantization=quantization,
        quantized=folder.quantized,
        folder=folder.folder,
        served_as=served_as,
    )
