"""The parameters that an engine builds for one linear, after fusion, and what fills them.

Both engines name a parameter as its stored tensor, put the parts of a fused linear one below the
other, and hold what each part has once in one element per part: executed with vLLM 0.33.0 and
SGLang 0.5.23 (`experiments/engines/run.py` compares every shape). Biases of attention and MLP were
executed with every combination of the engines' `biases` (`experiments/engines/kinds.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..drafts.engine_traits import Finding
from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from ..stored.layouts.scheme import FP8_DTYPE
from .contract import Module, Parameter, Question, Scheme
from .engine import Engine
from .engine_rows import Facts, concatenated, said
from .excludes import is_transformed
from .linear_scheme import LinearScheme

VOCAB_PADDING = 64
"""Rows of a head are filled up to a multiple of this before they are split."""
_FNUZ = "F8_E4M3FNUZ"
_GLOBAL_SCALES = ("weight_scale_2", "weight_global_scale")
BIAS_KEYS = ("attention_bias", "mlp_bias")


def parameters(
    module: Module,
    parts: Mapping[str, Mapping[str, TensorInfo]],
    shapes: Sequence[tuple[int, int]],
    scheme: LinearScheme | None,
    tp: int,
    *,
    biased: bool = False,
) -> tuple[Parameter, ...]:
    """Each parameter in one shard, by the [rows, columns] of each part there.

    `scheme` None = floats; `biased`: the linear has a bias, whatever its weight is.
    """
    rows, columns = sum(count for count, _ in shapes), shapes[0][1]
    if module.leaf == "lm_head":
        rows = -(-rows * tp // VOCAB_PADDING) * VOCAB_PADDING // tp
    expected: dict[str, tuple[int, ...]] = {"weight": (rows, columns)}
    if scheme is not None:
        expected = {
            suffix: part.shape if part.shape not in ((), (1,)) else (len(parts),)
            for suffix, part in scheme.parts(rows, columns).items()
        }
    if biased:
        expected["bias"] = (rows,)
    return tuple(
        Parameter(
            name=suffix,
            shape=shape,
            tensors=tuple(stored[suffix].name for stored in parts.values() if suffix in stored),
        )
        for suffix, shape in expected.items()
    )


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without trailing ones: engines load a column of scales as [out] or [out, 1]."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def fits(stored: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether the shapes are the same but for trailing ones."""
    return without_ones(stored) == without_ones(expected)


def never_fits(stored: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """An engine may cut a part out of a larger tensor, and stretch a single number."""
    stored, expected = without_ones(stored), without_ones(expected)
    return len(stored) != len(expected) or any(
        there < wanted for there, wanted in zip(stored, expected, strict=True)
    )


def refused_shape(tensor: TensorInfo, shape: tuple[int, ...], remedy: str) -> Finding:
    """The assertion with which loaders refuse a tensor of another shape than its parameter."""
    sizes = {"stored": str(list(tensor.shape))[1:-1], "shape": str(list(shape))[1:-1]}
    return said("refused-shape", tensor=tensor, remedy=remedy, **sizes)


def other_shape(tensor: TensorInfo, shape: tuple[int, ...]) -> Finding:
    """A tensor of which it is not known what a loader makes of its shape."""
    return said("other-shape", tensor=tensor, stored=list(tensor.shape), shape=list(shape))


def holds(tensor: TensorInfo, dtypes: Sequence[str]) -> bool:
    """Codes of the FNUZ kind are FP8 as well: engines copy them by value (executed)."""
    return tensor.dtype in dtypes or (FP8_DTYPE in dtypes and tensor.dtype == _FNUZ)


def one_global_scale(
    checkpoint: Checkpoint,
    module: Module,
    parts: Mapping[str, Mapping[str, TensorInfo]],
    taken: Scheme,
) -> Iterator[Finding]:
    """What becomes of parts of a fused linear that have different ones; their values are read."""
    from ..stored.decoded_numbers import stored_scalar  # numpy: for this question alone

    scales = [t for part in parts.values() for s, t in part.items() if s in _GLOBAL_SCALES]
    if len({stored_scalar(checkpoint, tensor) for tensor in scales}) < 2:
        return
    if taken.own_global_scales:
        yield said("own-global-scales", text=taken.own_global_scales)
    else:
        yield said("one-global-scale", name=module.name)


def of_shapes(config: Mapping[str, Any], said: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json without biases, which every family reads; `said`: as it was before.

    Heads are rotated whole where it does not say: that is no matter of shapes.
    """
    kept = {key: value for key, value in config.items() if not (key in BIAS_KEYS and value is True)}
    return {**kept, "partial_rotary_factor": said.get("partial_rotary_factor", 1.0)}


def built_biases(engine: Engine, question: Question) -> frozenset[str]:
    """Leaves to which it gives a bias for what config.json says, beside the family's own."""
    return frozenset().union(*(leaves or () for leaves in _asked(engine, question)))


def bias_findings(
    engine: Engine, question: Question, stored: Mapping[str, Any]
) -> Iterator[Finding]:
    """Biases that are built and not stored, and keys of which nothing is known."""
    for leaves in _asked(engine, question):
        if leaves is None:
            yield said("unread-biases")
    built = built_biases(engine, question)
    for module in engine.modules(question) if built else ():
        for part in module.parts:
            biased = part.rpartition(".")[2] in built
            if biased and part in stored and "bias" not in stored[part]:
                yield said("absent-bias", name=module.name, part=part)


def _asked(engine: Engine, question: Question) -> list[frozenset[str] | None]:
    built = engine.biases(question)
    return [
        leaves
        for key, leaves in zip(BIAS_KEYS, built, strict=True)
        if question.config.get(key) is True
    ]


# ---- A quantized linear as the rows of rules.toml look at it


def quantized_linear(
    question: Question, module: Module, scheme: LinearScheme, shapes: Sequence[tuple[int, int]]
) -> Facts:
    """Of one module that is stored quantized, and the [rows, columns] of its parts in one shard."""
    columns = shapes[0][1]
    group = scheme.group_size or columns  # inputs of one; all where there are no groups
    whole = columns * (question.tp if module.sharding == "row" else 1)
    return {
        "question": question,
        "module": module,
        "scheme": scheme,
        "rows": sum(rows for rows, _ in shapes),
        "columns": columns,
        "fused": len(shapes) > 1,
        "transformed": lambda: is_transformed(question, module.prefix),
        "concatenated": concatenated().get(scheme.signature),
        "group": group,
        "group_or_row": "row" if group in (columns, whole) else group,
        "cut_group": columns % group != 0,
        "less_than_a_group": columns < group,
        "cut_columns": columns % scheme.block[1] != 0,
        "cut_scales": _cut_scales([rows for rows, _ in shapes], scheme.block[0]),
        "cut_block": _cut_block(module, shapes, scheme.block, split=question.tp > 1),
    }


def _cut_scales(parts: Sequence[int], high: int) -> Facts | None:
    """Of the last part of a linear whose parts end in blocks, of so many rows: where they begin."""
    *first, last = parts
    if not any(rows % high for rows in first):
        return None
    return {"start": -(-sum(first) // high), "size": -(-(sum(first) + last) // high)}


def _cut_block(
    module: Module, shapes: Sequence[tuple[int, int]], block: tuple[int, int], *, split: bool
) -> Facts | None:
    """What is no whole number of blocks in a part or shard, as both engines' errors name it."""
    columns, (high, wide) = shapes[0][1], block
    if split and module.sharding == "row" and columns % wide:
        return {"size": f"input_size_per_partition = {columns}", "side": "block_k", "block": wide}
    every = split and module.sharding == "column"
    checked = shapes if every else shapes[:-1]  # in one piece the last part may end in the middle
    small = next((rows for rows, _ in checked if rows % high), None)
    if small is None:
        return None
    return {"size": f"output_partition_size = {small}", "side": "block_n", "block": high}
