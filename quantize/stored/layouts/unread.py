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
OTHER_WAY = "dequantize it with {}'s own library, or quantize the BF16 draft again"

_BF16 = "quantize the BF16 draft with draftquant"
_ROTATED = (
    "export it without rotations, whose part at run time replay does not compute (llm-compressor:"
    f" leave QuIPModifier and SpinQuantModifier out), or {_BF16}"
)
_INTEGERS_OF_8_BITS = (
    "export it as GPTQ (GPTQModel, AutoRound), whose weights of 8 bits are read; or in FP8, which"
    f" takes as many bytes; or {_BF16}: --recipe fp8-ptpc"
)
_WAYS_OUT: tuple[tuple[str, tuple[object, ...], str], ...] = (
    (".transform_config", (), _ROTATED),
    (".rotation", (), _ROTATED),
    (".adapter", (), f"merge the adapter into the BF16 draft, and {_BF16}"),
    (".sparsity_config", (), f"export it without compressed zeros (sparsity), or {_BF16}"),
    (
        ".weights.symmetric",
        (False,),
        "export it with symmetric: true, or as AWQ or GPTQ, whose zero points are read; or"
        f" {_BF16}",
    ),
    (
        ".weights.actorder",
        ("group", "dynamic"),
        'export it with actorder: "weight", which stores no order, or as GPTQ (desc_act), whose'
        f" order is read; or {_BF16}",
    ),
    (".weights.num_bits", (8,), _INTEGERS_OF_8_BITS),
    (".format", ("int-quantized",), _INTEGERS_OF_8_BITS),
    (
        ".data_type",
        (),
        f"export it to compressed-tensors (AutoRound: format='llm_compressor'), or {_BF16}",
    ),
    (".quant_algo", (), f"export it as FP8 or NVFP4, or {_BF16}"),
)
"""The end of a key, values that it is for (none = any), and what whoever has such a folder does."""


def way_out(key: str, got: object) -> str | None:
    """What to do about a declaration that is not read; None where nothing particular is known.

    Args:
        key: its path, such as "quantization_config.config_groups.group_0.weights.symmetric".
    """
    ways = (
        way for end, values, way in _WAYS_OUT if key.endswith(end) and (not values or got in values)
    )
    return next(ways, None)
