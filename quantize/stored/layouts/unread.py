"""Quantizations that are refused by name, with the reason."""

from collections.abc import Mapping

_OWN_CODES = "its codes are in a form that only its own library decodes"
UNREAD_METHODS: Mapping[str, str] = {
    "aqlm": _OWN_CODES,
    "bitsandbytes": "its codes and nested scales (quant_state) are decoded by bitsandbytes alone",
    "eetq": _OWN_CODES,
    "exl2": _OWN_CODES,
    "exl3": _OWN_CODES,
    "gguf": _OWN_CODES,
    "higgs": "its weights are rotated before they are rounded",
    "hqq": _OWN_CODES,
    "paroquant": "its weights are rotated before they are rounded",
    "quip": "its weights are rotated before they are rounded",
    "spqr": _OWN_CODES,
    "torchao": "it saves tensor subclasses, flattened or pickled, that it alone puts together",
    "vptq": _OWN_CODES,
}
"""By quant_method."""
