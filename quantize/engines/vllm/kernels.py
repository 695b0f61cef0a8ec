"""Which integers and blocks vLLM 0.33.0 has a kernel for, by bits, groups and a shard's shape.

Source: `choose_mp_linear_kernel` of `kernels/linear/__init__.py` and each kernel's `can_implement`;
executed (`tests/engines/foreign_mix.py`). On CUDA the last kernel, of the package humming-kernels
that vLLM's wheel asks for, takes all bits and groups. On ROCm there is Triton's, and one for
float16 alone, in which a draft is served where its target is.
"""

from ...drafts.engine_traits import Finding
from ..contract import Module, Question
from ..linear_scheme import BLOCK, LinearScheme

_TRITON_GROUPS = (32, 64, 128, 256)
_NO_KERNEL = "ValueError: Failed to find a kernel that can implement the WNA16 linear layer."
_NO_WHOLE_GROUPS = (
    "ValueError: Weight input_size_per_partition={columns} for layer '{prefix}' is not divisible by"
    " group_size={group_size}."
)
_WHOLE_GROUPS = "compressed-tensors "
"""Begins signatures that ask for whole groups in each shard."""
_OF_AWQ = "awq "
_CHOSEN = {
    f"{layout} int{bits}{mark}"
    for layout in ("compressed-tensors", "gptq", "auto-round")
    for bits in range(2, 9)
    for mark in ("", "+")
}
"""Begins signatures, before groups and activations, whose kernel is chosen so."""


def integer_problem(
    question: Question, module: Module, scheme: LinearScheme, rows: int, columns: int
) -> Finding | None:
    """Why no kernel takes a linear of `rows` and `columns` per shard."""
    kind, _, rest = scheme.signature.rpartition(" ")[0].rpartition(" ")
    if kind not in _CHOSEN or not scheme.signature.endswith(" none") or not rest:
        return None
    size, remedy = scheme.group_size or columns, f"keep {module.leaf} in BF16"
    uneven = columns % size != 0
    if uneven and scheme.signature.startswith(_WHOLE_GROUPS):
        said = {"columns": columns, "prefix": module.prefix, "group_size": size}
        return Finding(
            "init",
            _NO_WHOLE_GROUPS.format(**said),
            "serve the draft on fewer GPUs (--tp), or quantize in smaller groups",
        )
    if not question.arch.startswith("gfx"):
        return None
    whole = columns * (question.tp if module.sharding == "row" else 1)
    group = scheme.group_size in (None, whole, *_TRITON_GROUPS)
    four = kind.removesuffix("+").endswith("4")
    if four and group and not uneven and rows % 8 == 0:
        return None
    return Finding("init", _NO_KERNEL, f"{remedy}, or quantize to FP8: recipe fp8-ptpc")


def awq_problem(question: Question, module: Module, scheme: LinearScheme) -> Finding | None:
    """MLA takes kv_b_proj apart, on ROCm by a kernel for some groups: `awq_triton.py:308`."""
    size = scheme.group_size
    latent = module.leaf == "kv_b_proj" and scheme.signature.startswith(_OF_AWQ)
    if not latent or not question.arch.startswith("gfx") or size in (None, 32, 64, 128):
        return None
    text = (
        "AssertionError: vllm/model_executor/layers/quantization/awq_triton.py:308: assert"
        " group_size in AWQ_TRITON_SUPPORTED_GROUP_SIZES or group_size == K"
    )
    return Finding("after load", text, "quantize with groups of 128")


def powers_problem(module: Module, scheme: LinearScheme, columns: int) -> Finding | None:
    """MXFP8 has a scale for each 32 inputs, of which there are whole ones."""
    if scheme.weight_dtype != "mxfp8" or columns % 32 == 0:
        return None
    text = f"ValueError: MXFP8 requires input size divisible by 32, got {columns}"
    return Finding("init", text, f"keep {module.leaf} in BF16, or serve it on fewer GPUs (--tp)")


def marlin_block_problem(
    question: Question, module: Module, scheme: LinearScheme
) -> Finding | None:
    """FP8 in blocks of another size than 128 x 128 is for Marlin, but on Hopper for humming.

    Marlin is not asked whether it takes them. On Ampere compressed-tensors' weights are humming's.
    """
    alone = question.arch == "sm80" and scheme.signature.startswith(_WHOLE_GROUPS)
    if scheme.block == BLOCK or alone or question.arch not in ("sm80", "sm100"):
        return None
    text = (
        "AssertionError: vllm/model_executor/layers/quantization/utils/marlin_utils_fp8.py:124:"
        " assert layer.weight.shape == (part_size_k, part_size_n)"
    )
    return Finding("after load", text, f"quantize {module.leaf} in blocks of 128 x 128")
