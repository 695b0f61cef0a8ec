"""In which dtype each engine computes a draft beside its target, and whether the values fit.

Sources: vLLM 0.33 gives the draft the target's (`config/speculative.py:1437`); SGLang 0.5.23 reads
it of each config.json unless --dtype is given, and takes float16 where none is named or float32 is
(`configs/model_config.py:2284`); TensorRT-LLM loads the draft by its own torch_dtype
(`_torch/models/modeling_speculative.py` at 00679c66).
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..engines.contract import ENGINE_NAMES, TITLES, EngineName
from ..files.checkpoint import Checkpoint, byte_blocks
from ..files.safetensors_header import TensorInfo
from ..stored.decoded_numbers import floats
from .pair import Pair, PairFinding
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
    """The same of the target."""
    if pair.args.dtype is not None:
        return pair.args.dtype
    return _sglang_auto(pair.target.dtype) if engine == "sglang" else pair.target.dtype


def launch_dtype(pair: Pair, engine: EngineName) -> str | None:
    """What the launch line must say: as asked, or the target's where SGLang would split the two."""
    if engine != "sglang" or pair.args.dtype is not None:
        return pair.args.dtype
    theirs = pair.target.dtype
    return theirs if theirs in _HALVES and dtype_in(pair, "sglang") != theirs else None


def dtypes(pair: Pair) -> Iterator[PairFinding]:
    """Two dtypes where an engine wants one, and casts that engines do without a question."""
    own, theirs = stored_dtype(pair), pair.target.dtype
    cast = dtype_in(pair, "vllm")
    if own in _HALVES and cast in _HALVES and own != cast:
        yield PairFinding(
            "warning",
            "dtype",
            f"vLLM computes the draft in the target's dtype, {cast}, and casts its {own} weights",
            _wide_or_narrow(cast),
            "vllm",
        )
    given = launch_dtype(pair, "sglang")
    if given is not None and pair.args.dtype is None and not pair.is_inside:
        named = _draft_dtype(pair)
        said = f"names {named}" if named else "names none, which SGLang takes for float16"
        yield PairFinding(
            "warning",
            "dtype",
            f"the target's config.json names {theirs} and the draft's {said}: without --dtype"
            " SGLang computes each in its own, and a linear that reads the other's values ends with"
            " an error about dtypes",
            f"the launch line says --dtype {given}",
            "sglang",
        )
    if own in _HALVES and theirs in _HALVES and own != theirs and pair.args.dtype is None:
        yield PairFinding(
            "warning",
            "dtype",
            f"TensorRT-LLM builds the draft in its own dtype, {own}, beside a target in {theirs};"
            " what becomes of the hidden states between them was not read",
            f"write the draft's weights in {theirs}",
            "tensorrt-llm",
        )


def _wide_or_narrow(cast: str) -> str:
    if cast == "bfloat16":
        return "measure acceptance: bfloat16 keeps 8 of float16's 11 bits"
    return (
        "serve the target in --dtype bfloat16, or make sure that weights and activations stay below"
        " 65,504, where float16 ends"
    )


def stored_dtype(pair: Pair) -> str | None:
    """The dtype of the draft's floats: as config.json names it, else that of most of its bytes."""
    sizes: Counter[str] = Counter()
    for tensor in pair.draft.tensors.values():
        if tensor.dtype in _FLOATS:
            sizes[_FLOATS[tensor.dtype]] += tensor.nbytes
    return _draft_dtype(pair) or next((dtype for dtype, _ in sizes.most_common(1)), None)


def _draft_dtype(pair: Pair) -> str | None:
    return declared_dtype(pair.config)


def _sglang_auto(said: str | None) -> str:
    return "float16" if said in (None, "float32") else said


# ---- Weights and hidden states that float16 cannot hold, of a draft that is computed in it
#
# Source: IEEE 754: float16 ends at 65,504; what rounds beyond it becomes infinity.

_FIRST_OVERFLOW = 65520.0  # the smallest value that rounds to infinity in float16
_NARROW = "float16"
_WIDE = ("BF16", "F32")


class Overflow(NamedTuple):
    """A tensor with values beyond float16: how many, and the largest magnitude."""

    tensor: str
    values: int
    largest: float


def overflows(checkpoint: Checkpoint) -> Iterator[Overflow]:
    """Each tensor of BF16 or float32 that float16 cannot hold."""
    for tensor in checkpoint.tensors.values():
        if tensor.dtype in _WIDE:
            values, largest = _beyond(checkpoint, tensor)
            if values:
                yield Overflow(tensor.name, values, largest)


def _beyond(checkpoint: Checkpoint, tensor: TensorInfo) -> tuple[int, float]:
    values, largest = 0, 0.0
    for block in byte_blocks(checkpoint, tensor):
        magnitudes = np.abs(floats(np.frombuffer(block, np.uint8), tensor.dtype))
        values += int(np.count_nonzero(magnitudes >= _FIRST_OVERFLOW))
        largest = max(largest, float(magnitudes.max(initial=0.0)))
    return values, largest


def float16(pair: Pair) -> Iterator[PairFinding]:
    """Weights beyond float16, scanned where an engine computes the draft in it."""
    narrow = [engine for engine in ENGINE_NAMES if _is_narrow(pair, engine)]
    found = list(overflows(pair.draft)) if narrow and stored_dtype(pair) != _NARROW else []
    if not found:
        return
    worst = max(found, key=lambda each: each.largest)
    for engine in narrow:
        yield PairFinding(
            "wrong",
            "float16",
            f"{TITLES[engine]} computes the draft in float16, and {len(found)} of its tensors hold"
            f" values beyond it ({worst.tensor} up to {worst.largest:,.0f}): they become infinite,"
            " and no token is accepted",
            "serve target and draft with --dtype bfloat16",
            engine,
        )


def activations(pair: Pair) -> Iterator[PairFinding]:
    """Recorded hidden states of the target that float16 cannot hold."""
    largest = pair.largest_feature
    for engine in ENGINE_NAMES:
        if largest is None or largest < _FIRST_OVERFLOW or not _is_narrow(pair, engine):
            continue
        yield PairFinding(
            "wrong",
            "float16",
            f"{TITLES[engine]} computes the draft in float16, and the traces hold hidden states of"
            f" the target up to {largest:,.0f}, beyond float16: the draft reads infinities there,"
            " and no token is accepted",
            "serve target and draft with --dtype bfloat16",
            engine,
        )


def _is_narrow(pair: Pair, engine: EngineName) -> bool:
    return (launch_dtype(pair, engine) or dtype_in(pair, engine)) == _NARROW
