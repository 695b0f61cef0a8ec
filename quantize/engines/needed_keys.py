"""What both engines refuse of a declaration alike: absent keys, quantized outputs.

Source: `get_from_keys` of their configs, and `quark.py`.
"""

from collections.abc import Mapping

from ..drafts.engine_traits import Finding
from .declaration import Declaration

NO_OUTPUTS = (
    "NotImplementedError: Currently, Quark models with output_tensors and bias quantized are not"
    " supported"
)
_OF_AWQ = (("w_bit", "bits"), ("q_group_size", "group_size"), ("zero_point",))
Needed = Mapping[str, tuple[tuple[str, ...], ...]]
"""quant_method -> spellings of each key, one of which it needs."""
NEEDED: Needed = {
    "fp8": (("activation_scheme",),),
    "gptq": (("bits",), ("group_size",), ("desc_act",), ("sym",)),
    "awq": _OF_AWQ,
    "auto-round": (("bits",), ("group_size",)),
}


def absent_key(declaration: Declaration, needed: Needed) -> Finding | None:
    """The error for the first key that is not there."""
    for keys in needed.get(declaration.method or "", ()):
        if not any(key in declaration.keys for key in keys):
            text = (
                f"ValueError: Cannot find any of {list(keys)} in the model's quantization config."
            )
            return Finding("config", text, f"add {keys[-1]} to quantization_config")
    return None
