"""What a quantized folder declares in config.json: scheme, storage and excluded modules.

Read strictly and without any code of the writing side: a declaration that is not understood is an
error, never a guess. It knows JSON, not tensors. One module per layout.
"""

from ..checkpoint import CONFIG_FILE, Checkpoint
from . import awq, compressed_tensors, fp8, modelopt, quark
from .modelopt import HF_QUANT_CONFIG
from .reader import ObjectReader
from .scheme import Activations, DeclaredScheme, check_patterns

__all__ = ["HF_QUANT_CONFIG", "Activations", "DeclaredScheme", "declared_scheme"]

_LAYOUTS = {
    "quark": quark.read,
    "compressed-tensors": compressed_tensors.read,
    "modelopt": modelopt.read,
    "fp8": fp8.read,
    "awq": awq.read,
}
# Keys that say who made the folder or how values were found, never how to decode them.
_NO_MEANING = frozenset({"producer", "version", "quant_mode", "global_compression_ratio"})


def declared_scheme(checkpoint: Checkpoint) -> DeclaredScheme | None:
    """Read the `quantization_config` of a folder; None where there is none: nothing is quantized.

    Raises:
        VerifyError: the declaration says something that this reader does not understand, or two
            declarations of one folder disagree.
        CheckpointError: hf_quant_config.json is not readable as JSON.
    """
    declared = checkpoint.config.get("quantization_config")
    if declared is None:
        return None
    keys = ObjectReader.of(
        declared, checkpoint.folder / CONFIG_FILE, "quantization_config", ignored=_NO_MEANING
    )
    method = keys.choice("quant_method", *_LAYOUTS)
    scheme = _LAYOUTS[method](keys)
    if method == "modelopt":
        modelopt.check_nested(checkpoint, scheme, str(declared["quant_algo"]))
    keys.finish()
    check_patterns(keys, scheme)
    return scheme
