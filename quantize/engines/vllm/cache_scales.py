"""What vLLM 0.33.0 makes of a stored scale of the KV cache, whatever it is called.

Source: `get_cache_scale_mapper` of `base_config.py`, `fp8.py` and `quark.py`, `AutoWeightsLoader`,
`KVCacheScaleParameter`, and `CompressedTensorsKVCacheMethod`; executed (`tests/engines/kinds.py`,
`tests/engines/foreign_mix.py`).
"""

import re

from ...drafts.engine_traits import Finding
from ...files.safetensors_header import TensorInfo
from ..contract import Question

_OF_OUTPUTS = re.compile(r"\.self_attn\.(?:[qkv]_proj\.output_scale|prob_output_scale)$")
_OF_ATTENTION = re.compile(
    r"\.self_attn\.(?:attn\.[qkv]_(?:scale|zero_point)|(?:[kv]_proj\.)?[kv]_scale|q_scale|kv_scale"
    r"|[qkv]_zero_point)$"
)
_NO_DATA = "AttributeError: 'QKVParallelLinear' object has no attribute 'data'"
_RENAME = "rename k_proj.output_scale to k_scale, and v_proj.output_scale to v_scale"
_BY_OUTPUTS = frozenset({"fp8", "quark"})
"""Each quant_method that takes scales of the outputs of linears for those of the cache."""
_PER_TENSOR = frozenset({"fp8", "modelopt", "quark"})
_BOTH = _PER_TENSOR | {"compressed-tensors"}
"""Each quant_method whose attention has such scales; under others they are dropped."""


def cache_scale(question: Question, tensor: TensorInfo) -> bool | Finding | None:
    """Whether it reads it; a finding where it drops or refuses it."""
    method, name = question.method, tensor.name
    if method is None or question.is_latent:
        return False
    if question.own.mtp is not None:
        return None
    outputs = bool(_OF_OUTPUTS.search(name)) and method in _BY_OUTPUTS
    if not outputs and not _OF_ATTENTION.search(name):
        return False
    if outputs and not (question.traits.whole_model or question.traits.drafts_blocks):
        return Finding("load", _NO_DATA, _RENAME)
    if name.endswith("_zero_point"):  # symmetric: all zero, and never used
        return True
    if method not in _BOTH:
        text = f"vLLM drops {name}: under quant_method {method} its KV cache has no scales"
        return Finding("wrong", text, f"remove {name}: an FP8 KV cache is served with a scale of 1")
    per_head = method == "compressed-tensors" and _is_per_head(question)
    if per_head and not name.endswith("q_scale"):
        heads = question.config.get("num_key_value_heads", 0)
        return True if tensor.numel in (1, heads) else _refused(tensor, [heads])
    if per_head or tensor.numel == 1:
        return True
    if method in _PER_TENSOR:
        text = f"ValueError: KV-cache scale expects a scalar weight, got shape {tensor.shape}"
        return Finding("load", text, "store one scale per layer, not one per head")
    return _refused(tensor, [1])


def _is_per_head(question: Question) -> bool:
    keys = question.declaration.keys if question.declaration else {}
    scheme = keys.get("kv_cache_scheme")
    return isinstance(scheme, dict) and scheme.get("strategy") == "attn_head"


def _refused(tensor: TensorInfo, shape: list[int]) -> Finding:
    text = f"AssertionError: {tensor.name} is {list(tensor.shape)}, its parameter {shape}"
    remedy = "declare the strategy attn_head in kv_cache_scheme, or store one scale per layer"
    return Finding("load", text, remedy)
