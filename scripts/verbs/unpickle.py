"""`unpickle`: a draft's pickled weights (pytorch_model.bin) as safetensors."""

from dataclasses import dataclass
from pathlib import Path

from ...quantize.files.hub import Reference, resolve_draft
from ...recipes.listener import Heard
from ...recipes.regular_file import AnyPath
from ..frame import reports
from ..frame.console import megabytes, stdout
from ..frame.verb import Command, verb


@dataclass(frozen=True)
class UnpickleSettings(Heard):
    """Which draft, into which folder."""

    draft: Reference
    out: AnyPath


@verb(UnpickleSettings)
def unpickle(settings: UnpickleSettings) -> "reports.Unpickled":
    """Write a draft's pickled weights as safetensors, without running any pickled code.

    Returns:
        What was written.

    Raises:
        DraftQuantError: there are no pickles, or they hold more than plain tensors; nothing is left
            behind.
    """
    from ...quantize.making.unpickle_draft import unpickle_draft

    return unpickle_draft(resolve_draft(str(settings.draft)).folder, Path(settings.out))


def _show(done: "reports.Unpickled", _settings: object) -> None:
    stdout().line(
        (str(done.out), "bold"),
        f": {done.tensors} tensors of {', '.join(done.files)}, {megabytes(done.nbytes)}, value"
        " for value",
    )


COMMAND = Command(
    unpickle,
    _show,
    lambda done, _: {
        "out": done.out,
        "files": done.files,
        "tensors": done.tensors,
        "bytes": done.nbytes,
    },
)
