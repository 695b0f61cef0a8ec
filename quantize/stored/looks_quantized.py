"""Whether a folder is stored quantized, asked before anything else of it is understood."""

from ..files.checkpoint import Checkpoint
from .declarations import raw_declaration
from .parts import quantized_looking


def looks_quantized(checkpoint: Checkpoint) -> bool:
    """True if a folder declares a quantization, or stores tensors that only quantized linears have.

    Reads no tensor data.

    Raises:
        CheckpointError: hf_quant_config.json is not readable as JSON.
    """
    return raw_declaration(checkpoint) is not None or bool(
        quantized_looking(checkpoint.tensors.values())
    )
