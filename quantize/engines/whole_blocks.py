"""What both engines ask of blocks and groups: whole ones in every part and shard.

Source: `validate_fp8_block_shape`, the same in vLLM 0.33.0 and SGLang 0.5.23, executed with parts
and shards that are no whole blocks of 128 x 128; INT4 and FP4 executed with shards that are no
whole groups.
"""

from collections.abc import Collection, Mapping

from ..drafts.engine_traits import Finding
from .contract import Module, Question
from .linear_scheme import LinearScheme

_CUT = ("gptq", "auto-round")
_FEWER = "serve the draft on fewer GPUs (--tp), or quantize in smaller groups"


def block_problem(
    question: Question, module: Module, shapes: list[tuple[int, int]], block: tuple[int, int]
) -> Finding | None:
    """Why an engine refuses to build a module in blocks, whose parts have `shapes` per shard."""
    split, columns = question.tp > 1, shapes[0][1]
    high, wide = block
    if split and module.sharding == "row" and columns % wide:
        return _refused(module, f"input_size_per_partition = {columns}", "block_k", wide)
    every = split and module.sharding == "column"
    checked = shapes if every else shapes[:-1]  # in one piece the last part may end in the middle
    small = next((rows for rows, _ in checked if rows % high), None)
    if small is None:
        return None
    return _refused(module, f"output_partition_size = {small}", "block_n", high)


def group_problem(
    module: Module,
    scheme: LinearScheme,
    columns: int,
    errors: Mapping[str, str],
    dropped: Collection[str] = (),
) -> Finding | None:
    """Why an engine refuses to build a module in groups.

    Args:
        scheme: as which it is taken.
        errors: signature, or "layout dtype" -> the engine's error; others were not executed.
        dropped: "layout dtype" of which it builds no scale for a shard of less than one group, and
            drops the stored ones.
    """
    size = scheme.group_size or 1
    if scheme.granularity != "group" or columns % size == 0:
        return None
    kind, remedy = f"{scheme.layout} {scheme.weight_dtype}", _FEWER
    text = errors.get(scheme.signature, errors.get(kind))
    if text is not None:
        said = text.format(columns=columns, prefix=module.prefix, group_size=size)
        return Finding("init", said, remedy)
    if kind in dropped and columns < size:
        text = (
            f"The scales of {module.name} are dropped, because one GPU's share is less than a group"
        )
        return Finding("wrong", text, remedy)
    text = f"The groups of {module.name} are split between GPUs, which was never executed"
    return Finding("unknown", text, remedy)


def cut_groups(module: Module, scheme: LinearScheme, columns: int) -> Finding | None:
    """GPTQ's and AutoRound's scales where a shard begins or ends within a group.

    Both engines take as many scales as whole groups fit into a shard, and no kernel minds.
    """
    size = scheme.group_size or columns
    if scheme.layout not in _CUT or scheme.weight_dtype.startswith("awq") or not columns % size:
        return None
    text = (
        f"A group of {size} inputs of {module.name} is split between GPUs, and its scale is served"
        " for other inputs"
    )
    return Finding("wrong", text, _FEWER)


def _refused(module: Module, size: str, side: str, block: int) -> Finding:
    return Finding(
        "init",
        f"ValueError: Weight {size} is not divisible by weight quantization {side} = {block}.",
        f"quantize {module.leaf} per channel, or serve the draft on fewer GPUs (--tp)",
    )
