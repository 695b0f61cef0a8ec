"""The dtype in which each engine computes a draft beside its target, and whether values fit in it.

Sources: vLLM 0.33 gives the draft the target's (`config/speculative.py:1437`); SGLang 0.5.23 reads
it from each config.json unless --dtype is given, and uses float16 for none or float32
(`configs/model_config.py:2284`); TensorRT-LLM loads the draft by its own torch_dtype
(`_torch/models/modeling_speculative.py` at 00679c66).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..engines.contract import EngineName
from ..files.checkpoint import Checkpoint, byte_blocks
from ..stored.decoded_numbers import floats
from .pair import Pair
from .target import declared_dtype

_HALVES = ("float16", "bfloat16")
_FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def dtype_in(pair: Pair, engine: EngineName) -> str | None:
    """The dtype that the draft computes in; None = not known."""
    if pair.args.dtype is not None:
        return pair.args.dtype
    if engine == "sglang":
        return _sglang_auto(_draft_dtype(pair))
    return target_dtype(pair, engine) if engine == "vllm" else _draft_dtype(pair)


def target_dtype(pair: Pair, engine: EngineName) -> str | None:
    """The dtype that the target computes in."""
    if pair.args.dtype is not None:
        return pair.args.dtype
    return _sglang_auto(pair.target.dtype) if engine == "sglang" else pair.target.dtype


def launch_dtype(pair: Pair, engine: EngineName) -> str | None:
    """The launch line's --dtype: as asked, or the target's where SGLang would use two."""
    if engine != "sglang" or pair.args.dtype is not None:
        return pair.args.dtype
    theirs = pair.target.dtype
    return theirs if theirs in _HALVES and dtype_in(pair, "sglang") != theirs else None


def facts(pair: Pair, engines: Sequence[EngineName]) -> dict[str, Any]:
    """Facts on dtypes: casts that engines do silently."""
    stored, theirs, cast = stored_dtype(pair), pair.target.dtype, dtype_in(pair, "vllm")
    given, named = launch_dtype(pair, "sglang"), _draft_dtype(pair)
    asked, halves = pair.args.dtype is not None, {stored, cast} <= {*_HALVES}
    splits = given is not None and not asked and not pair.is_inside
    narrow, feature = any(is_narrow(pair, each) for each in engines), pair.largest_feature
    return {
        "own_dtype": stored,
        "their_dtype": theirs,
        "cast": cast,
        "is_cast": halves and stored != cast,
        "given": given,
        "splits_dtypes": splits,
        "said": f"names {named}" if named else "names none, which SGLang takes for float16",
        "beyond": _beyond(pair.draft) if narrow and stored != "float16" else None,
        "feature": feature if feature is not None and feature >= _FIRST_OVERFLOW else None,
    }


def is_narrow(pair: Pair, engine: EngineName) -> bool:
    """Whether the draft is computed in float16."""
    return (launch_dtype(pair, engine) or dtype_in(pair, engine)) == "float16"


def stored_dtype(pair: Pair) -> str | None:
    """The dtype of the draft's floats: as config.json names it, or that of most of its bytes."""
    sizes: Counter[str] = Counter()
    for tensor in pair.draft.tensors.values():
        if tensor.dtype in _FLOATS:
            sizes[_FLOATS[tensor.dtype]] += tensor.nbytes
    return _draft_dtype(pair) or next((dtype for dtype, _ in sizes.most_common(1)), None)


def _draft_dtype(pair: Pair) -> str | None:
    return declared_dtype(pair.config)


def _sglang_auto(declared: str | None) -> str:
    return "float16" if declared in (None, "float32") else declared


# Source: IEEE 754: float16 ends at 65,504; what rounds beyond that becomes infinity.
_FIRST_OVERFLOW = 65520.0  # the smallest value that rounds to infinity in float16


def _beyond(checkpoint: Checkpoint) -> str | None:
    """How many tensors hold values beyond float16, and the largest magnitude."""
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
