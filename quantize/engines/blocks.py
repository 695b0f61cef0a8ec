"""What both engines ask of weights in blocks of 128 x 128: whole blocks in every part and shard.

Source: `validate_fp8_block_shape`, the same in vLLM 0.33.0 and SGLang 0.5.23, executed with parts
and shards that are no whole blocks.
"""

from .contract import Finding, Module, Question

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


def _refused(module: Module, size: str, side: str) -> Finding:
    return Finding(
        "init",
        f"ValueError: Weight {size} is not divisible by weight quantization {side} = {BLOCK}.",
        f"quantize {module.leaf} per channel, or use fewer tensor-parallel shards",
    )
