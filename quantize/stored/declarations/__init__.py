"""What a quantized folder declares in config.json: scheme, storage and excluded modules.

Read strictly and without any code of the writing side: a declaration that is not understood is an
error, never a guess. It knows JSON, not tensors. One module per layout.
"""

from collections.abc import Callable, Mapping

from ...files.checkpoint import Checkpoint
from . import awq, compressed_tensors, fp8, modelopt, quark
from .raw import HF_QUANT_CONFIG, Form, RawDeclaration, raw_declaration
from .reader import ObjectReader
from .scheme import Activations, DeclaredScheme, check_patterns

__all__ = [
    "HF_QUANT_CONFIG",
    "NO_MEANING",
    "READERS",
    "Activations",
    "DeclaredScheme",
    "Form",
    "ObjectReader",
    "RawDeclaration",
    "declared_scheme",
    "raw_declaration",
]

READERS: Mapping[str, Callable[[ObjectReader], DeclaredScheme]] = {
    "quark": quark.read,
    "compressed-tensors": compressed_tensors.read,
    "modelopt": modelopt.read,
    "fp8": fp8.read,
    "awq": awq.read,
}
# Keys that say who made the folder or how values were found, never how to decode them.
NO_MEANING = frozenset({"producer", "version", "quant_mode", "global_compression_ratio"})


def declared_scheme(checkpoint: Checkpoint) -> DeclaredScheme | None:
    """Read what a folder declares; None where it declares nothing: nothing is quantized.

    Raises:
        VerifyError: the declaration says something that this reader does not understand, or two
            declarations of one folder disagree.
        CheckpointError: hf_quant_config.json is not readable as JSON.
    """
    raw = raw_declaration(checkpoint)
    if raw is None:
        return None
    keys = ObjectReader.of(raw.value, raw.where, raw.key, ignored=NO_MEANING)
    method = keys.choice("quant_method", *READERS)
    scheme = READERS[method](keys)
    if method == "modelopt" and raw.form != "side file":
        modelopt.check_side_file(checkpoint, scheme, str(raw.value["quant_algo"]))
    keys.finish()
    check_patterns(keys, scheme)
    return scheme
