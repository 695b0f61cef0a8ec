"""The dtype in which each engine computes a draft beside its target, and whether values fit in it.

Sources: vLLM 0.33 gives the draft the target's (`config/speculative.py:1437`); SGLang 0.5.23 reads
it from each config.json unless --dtype is given, and uses float16 for none or float32
(`configs/model_config.py:2284`); TensorRT-LLM loads the draft by its own torch_dtype
(`_torch/models/modeling_speculative.py` at 00679c66).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..engines.contract import EngineName
from ..files.checkpoint import Checkpoint, byte_blocks
from ..stored.decoded_numbers import floats
from .pair import Pair
from .target import declared_dtype


def dtype_in(pair: Pair, engine: EngineName) -> str | None:
    """The dtype that the draft computes in; None = not known."""
    if pair.args.dtype is not None:
        return pair.args.dtype
    named = pair.target.dtype if engine == "vllm" else declared_dtype(pair.config)
    return "float16" if engine == "sglang" and named in (None, "float32") else named


def launch_dtype(pair: Pair, engine: EngineName) -> str | None:
    """The launch line's --dtype: as asked, or the target's where SGLang would use two."""
    if engine != "sglang" or pair.args.dtype is not None:
        return pair.args.dtype
    theirs = pair.target.dtype
    halves = theirs in ("float16", "bfloat16")
    return theirs if halves and dtype_in(pair, "sglang") != theirs else None


def facts(pair: Pair, engines: Sequence[EngineName]) -> dict[str, Any]:
    """Facts on dtypes: casts that engines do silently."""
    given, named = launch_dtype(pair, "sglang"), declared_dtype(pair.config)
    cast = dtype_in(pair, "vllm")
    narrow, feature = any(is_narrow(pair, each) for each in engines), pair.largest_feature
    return {
        "own_dtype": named,
        "their_dtype": pair.target.dtype,
        "cast": cast,
        "is_cast": {named, cast} == {"float16", "bfloat16"},
        "given": given,
        "splits_dtypes": given is not None and pair.args.dtype is None and not pair.is_inside,
        "said": f"names {named}" if named else "names none, which SGLang takes for float16",
        "beyond": _beyond(pair.draft) if narrow else None,
        "feature": feature if feature is not None and feature >= _FIRST_OVERFLOW else None,
    }


def is_narrow(pair: Pair, engine: EngineName) -> bool:
    """Whether the draft is computed in float16."""
    return (launch_dtype(pair, engine) or dtype_in(pair, engine)) == "float16"


# Source: IEEE 754: float16 ends at 65,504; what rounds beyond that becomes infinity.
_FIRST_OVERFLOW = 65520.0  # the smallest value that rounds to infinity in float16


def _beyond(checkpoint: Checkpoint) -> str | None:
    peaks: dict[str, float] = {}
    for tensor in checkpoint.tensors.values():
        blocks = byte_blocks(checkpoint, tensor) if tensor.dtype in ("BF16", "F32") else ()
        for block in blocks:
            magnitudes = np.abs(floats(np.frombuffer(block, np.uint8), tensor.dtype))
            beyond = magnitudes[magnitudes >= _FIRST_OVERFLOW]
            if beyond.size:
                peaks[tensor.name] = max(peaks.get(tensor.name, 0.0), float(beyond.max()))
    if not peaks:
        return None
    worst = max(peaks, key=lambda name: peaks[name])
    return f"{len(peaks)} of its tensors hold values beyond it ({worst} up to {peaks[worst]:,.0f})"
