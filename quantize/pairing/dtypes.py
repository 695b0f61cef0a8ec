"""In which dtype each engine computes a draft beside its target, and whether the values fit.

Sources: vLLM 0.33 gives the draft the target's (`config/speculative.py:1437`); SGLang 0.5.23 reads
it of each config.json unless --dtype is given, and takes float16 where none is named or float32 is
(`configs/model_config.py:2284`); TensorRT-LLM loads the draft by its own torch_dtype
(`_torch/models/modeling_speculative.py` at 00679c66).
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from ..engines.contract import ENGINE_NAMES, TITLES, EngineName
from ..engines.engine_rows import Facts
from ..files.checkpoint import Checkpoint, byte_blocks
from ..files.safetensors_header import TensorInfo
from ..stored.decoded_numbers import floats
from .pair import Pair, PairFinding, finding
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


def facts(pair: Pair) -> Facts:
    """What rows of findings.toml say of dtypes: casts that engines do without a question."""
    own, theirs, cast = stored_dtype(pair), pair.target.dtype, dtype_in(pair, "vllm")
    given, named = launch_dtype(pair, "sglang"), _draft_dtype(pair)
    asked, halves = pair.args.dtype is not None, {own, cast} <= {*_HALVES}
    splits = given is not None and not asked and not pair.is_inside
    return {
        "own_dtype": own,
        "their_dtype": theirs,
        "cast": cast,
        "is_cast": halves and own != cast,
        "given": given,
        "splits_dtypes": splits,
        "said": f"names {named}" if named else "names none, which SGLang takes for float16",
        "has_two_dtypes": not asked and own != theirs and {own, theirs} <= {*_HALVES},
    }


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
# Source: IEEE 754: float16 ends at 65,504; what rounds beyond it becomes infinity.

_FIRST_OVERFLOW = 65520.0  # the smallest value that rounds to infinity in float16
_NARROW = "float16"
_WIDE = ("BF16", "F32")


def _beyond(checkpoint: Checkpoint, tensor: TensorInfo) -> float:
    """The largest magnitude that float16 cannot hold; 0 where it holds all."""
    largest = 0.0
    for block in byte_blocks(checkpoint, tensor):
        magnitudes = np.abs(floats(np.frombuffer(block, np.uint8), tensor.dtype))
        beyond = magnitudes[magnitudes >= _FIRST_OVERFLOW]
        largest = max(largest, float(beyond.max(initial=0.0)))
    return largest


def float16(pair: Pair) -> Iterator[PairFinding]:
    """Weights beyond float16, scanned where an engine computes the draft in it."""
    narrow = [engine for engine in ENGINE_NAMES if _is_narrow(pair, engine)]
    if not narrow or stored_dtype(pair) == _NARROW:
        return
    wide = [each for each in pair.draft.tensors.values() if each.dtype in _WIDE]
    found = {each.name: largest for each in wide if (largest := _beyond(pair.draft, each))}
    worst = max(found, key=lambda name: found[name], default="")
    where = {"count": len(found), "tensor": worst, "largest": found.get(worst)}
    for engine in narrow if found else ():
        yield finding("float16-weights", engine, title=TITLES[engine], **where)


def activations(pair: Pair) -> Iterator[PairFinding]:
    """Recorded hidden states of the target that float16 cannot hold."""
    largest = pair.largest_feature
    for engine in ENGINE_NAMES if largest is not None and largest >= _FIRST_OVERFLOW else ():
        if _is_narrow(pair, engine):
            yield finding("float16-activations", engine, title=TITLES[engine], largest=largest)


def _is_narrow(pair: Pair, engine: EngineName) -> bool:
    return (launch_dtype(pair, engine) or dtype_in(pair, engine)) == _NARROW
