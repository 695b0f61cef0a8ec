"""Tensor-parallel sizes that a draft and its target both allow.

Engines divide query heads evenly, divide or repeat heads of keys and values, and divide the
columns of the MLP and the rows of embedding and head, which are padded to multiples of 64.
Source: vLLM 0.33 `config/model.py:1557`, `QKVParallelLinear`, `VocabParallelEmbedding`; SGLang
0.5.23 has the same layers. The draft is split as the target is: vLLM takes no other
`draft_tensor_parallel_size` than 1 and the target's (`config/speculative.py:1849`), the others have
no such option.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .pair import Pair, PairFinding

MOST = 16
_PADDED_TO = 64


def sizes_of_both(pair: Pair) -> tuple[int, ...]:
    """Sizes up to 16 that divide both."""
    configs = [pair.target.text, *([] if pair.is_inside else [pair.config])]
    return tuple(tp for tp in range(1, MOST + 1) if all(_divides(tp, c) for c in configs))


def tensor_parallel(pair: Pair) -> Iterator[PairFinding]:
    """A size that one of the two does not allow."""
    tp = pair.tp
    allowed = sizes_of_both(pair)
    if tp in allowed or tp > MOST:
        return
    whose = [
        f"the {name}'s {problem}"
        for name, config in (("target", pair.target.text), ("draft", pair.config))
        if (problem := _problem(tp, config)) is not None
    ]
    text = f"{' and '.join(whose)} cannot be split over {tp} GPUs"
    yield PairFinding("refused", "tensor-parallel", text, f"use one of {_listed(allowed)} GPUs")


def _divides(tp: int, config: Mapping[str, Any]) -> bool:
    return _problem(tp, config) is None


def _problem(tp: int, config: Mapping[str, Any]) -> str | None:
    """What of a config cannot be divided; keys that are absent are no obstacle."""
    heads, few = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if type(heads) is int and heads % tp:
        return f"{heads} attention heads"
    if type(few) is int and few > 0 and few % tp and tp % few and "kv_lora_rank" not in config:
        return f"{few} heads of keys and values"
    for key in ("intermediate_size", "moe_intermediate_size"):
        width = config.get(key)
        if type(width) is int and width % tp:
            return f"{key} of {width}"
    vocab = config.get("vocab_size")
    if type(vocab) is int and -(-vocab // _PADDED_TO) * _PADDED_TO % tp:
        return f"vocabulary of {vocab}, padded to a multiple of {_PADDED_TO},"
    return None


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
