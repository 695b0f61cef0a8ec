"""`unpickle`: a draft's pickled weights (pytorch_model.bin) as safetensors."""

from dataclasses import dataclass
from pathlib import Path

from ...quantize.files.hub import resolve_draft
from . import reports
from .arguments import Draft, OutFolder
from .settings import Settings
from .verb import verb


@dataclass(frozen=True, slots=True)
class UnpickleSettings(Settings):
    """Of which draft, into which folder."""

    draft: Draft
    out: OutFolder


@verb(UnpickleSettings)
def unpickle(settings: UnpickleSettings) -> "reports.Unpickled":
    """Write a draft's pickled weights as safetensors, without running any pickled code.

    Returns:
        What was written.

    Raises:
        DraftQuantError: there are no pickles, or they hold more than plain tensors; nothing is left
            behind.
    """
    from ...quantize.files.unpickle_draft import unpickle_draft

    return unpickle_draft(resolve_draft(str(settings.draft)).folder, Path(settings.out))
