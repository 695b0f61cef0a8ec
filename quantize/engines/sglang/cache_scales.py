"""What SGLang 0.5.23 makes of a stored scale of the KV cache, whatever it is called.

Source: `maybe_remap_kv_scale_name`, which `llama.py` alone calls for a draft, and the methods of
`RadixAttention`; executed (`tests/engines/kinds.py`, `tests/engines/foreign_mix.py`).
"""

import re
from collections.abc import Mapping
from typing import Any

from ...drafts.architectures import declared_architecture
from ...drafts.engine_traits import Finding
from ...files.safetensors_header import TensorInfo
from ..contract import Question

_RENAMED = re.compile(
    r"\.self_attn\.(?:[kv]_scale|kv_scale|k_proj\.(?:k_scale|output_scale)"
    r"|v_proj\.(?:v_scale|output_scale))$"
)
_OWN = re.compile(r"\.self_attn\.attn\.[kv]_scale$")
_RENAMING = "LlamaForCausalLM"


def cache_scale(question: Question, tensor: TensorInfo) -> bool | Finding | None:
    """Whether it reads it; a finding where it refuses it. What it does not read it drops."""
    if tensor.name.endswith("_zero_point"):  # symmetric: all zero, and never used
        return True
    mtp = question.own.mtp
    if mtp is not None:  # some loaders look it up without asking whether it is there
        own = _OWN.search(tensor.name) is not None
        return mtp.cache_scales and _has_scales(question) if own else False
    renames = declared_architecture(question.config) == _RENAMING
    names = _RENAMED if renames else _OWN
    if not _has_scales(question) or question.is_latent:
        return False
    if not names.search(tensor.name) or (question.traits.whole_model and not renames):
        return False
    if tensor.numel == 1:
        return True
    text = f"AssertionError: Attempted to load weight (torch.Size({list(tensor.shape)}))"
    remedy = "store one scale per layer, not one per head"
    return Finding("load", f"{text} into parameter (torch.Size([]))", remedy)


def _has_scales(question: Question) -> bool:
    """Whether the attention of a draft has scales that a tensor can fill."""
    method = question.method
    keys = question.declaration.keys if question.declaration else {}
    if method == "compressed-tensors":
        return _is_one_per_layer(keys.get("kv_cache_scheme"))
    if method == "modelopt" and question.declaration and question.declaration.form == "nested":
        return False  # `_parse_modelopt_quant_config` leaves its algorithm alone
    if method == "modelopt":
        scheme = keys.get("kv_cache_scheme")
        return isinstance(scheme, Mapping) or bool(keys.get("kv_cache_quant_algo"))
    return method in ("fp8", "quark")


def _is_one_per_layer(scheme: Any) -> bool:
    """`CompressedTensorsKVCacheMethod.is_supported_scheme`; another one is ignored."""
    wanted = {"type": "float", "num_bits": 8, "strategy": "tensor"}
    return (
        isinstance(scheme, Mapping)
        and all(scheme.get(key) == value for key, value in wanted.items())
        and scheme.get("symmetric", True)
        and not scheme.get("dynamic", False)
    )
