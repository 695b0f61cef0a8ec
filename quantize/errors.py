"""The errors of this package; see `recipes.errors` for their form."""

from ..recipes.errors import DraftQuantError

PASS_TRACES = (
    "pass --traces CALIBRATION, recorded on other prompts than those of the gate; from one folder:"
    " draftquant traces split TRACES --fraction 0.3 --out CALIBRATION GATE"
)
"""The fix where a recipe must know the inputs of the linears."""


class CheckpointError(DraftQuantError):
    """A draft folder, its config, its index or a safetensors header is not what it claims."""


class PlanError(DraftQuantError):
    """The recipe and the draft do not fit each other."""


class LayoutError(DraftQuantError):
    """A layout cannot express the recipe's formats."""


class BackendError(DraftQuantError):
    """A vendor toolkit is missing, unusable, or refused a weight."""


class OutputError(DraftQuantError):
    """An output, folder or file, cannot be written: it exists, overlaps the input, ..."""


class VerifyError(DraftQuantError):
    """The folder to verify cannot even be read as a quantized draft."""


class DeclarationError(VerifyError):
    """A quantization_config says what is not understood here: the input is to blame, no weights."""


class ForwardError(DraftQuantError):
    """A draft computes NaN or infinity."""


class EstimateError(DraftQuantError):
    """Speed cannot be estimated: of an unknown GPU, of such a target, or of such a number."""
