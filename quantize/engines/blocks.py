"""What both engines ask of blocks and groups: whole ones in every part and shard.

Source: `validate_fp8_block_shape`, the same in vLLM 0.33.0 and SGLang 0.5.23, executed with parts
and shards that are no whole blocks of 128 x 128; INT4 executed with shards of half a group.
"""

from collections.abc import Mapping

from .contract import Finding, Module, Question
from .linear_scheme import LinearScheme

BLOCK = 128


def block_problem(
    question: Question, module: Module, shapes: list[tuple[int, int]]
) -> Finding | None:
    """Why an engine refuses to build a module in blocks, whose parts have `shapes` per shard."""
    split, columns = question.tp > 1, shapes[0][1]
    if split and module.sharding == "row" and columns % BLOCK:
        return _refused(module, f"input_size_per_partition = {columns}", "block_k")
    every = split and module.sharding == "column"
    checked = shapes if every else shapes[:-1]  # in one piece the last part may end in the middle
    small = next((rows for rows, _ in checked if rows % BLOCK), None)
    if small is None:
        return None
    return _refused(module, f"output_partition_size = {small}", "block_n")


def group_problem(
    module: Module, scheme: LinearScheme, columns: int, errors: Mapping[str, str]
) -> Finding | None:
    """Why an engine refuses to build a module in groups.

    Args:
        module: the linear.
        scheme: as which it is taken.
        columns: its inputs in one shard.
        errors: "layout dtype" -> the engine's error; others were not executed.
    """
    if scheme.granularity != "group" or columns % (scheme.group_size or 1) == 0:
        return None
    text = errors.get(f"{scheme.layout} {scheme.weight_dtype}")
    if text is None:
        return Finding("unknown", f"{module.name}: groups are split by shards", "use fewer")
    said = text.format(columns=columns, prefix=module.prefix, group_size=scheme.group_size)
    return Finding("init", said, "use fewer tensor-parallel shards, or smaller groups")


def _refused(module: Module, size: str, side: str) -> Finding:
    return Finding(
        "init",
        f"ValueError: Weight {size} is not divisible by weight quantization {side} = {BLOCK}.",
        f"quantize {module.leaf} per channel, or use fewer tensor-parallel shards",
    )
