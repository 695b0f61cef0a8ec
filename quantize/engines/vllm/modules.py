"""What vLLM does with a draft: the rules from which its `versions` are put together.

Sources, all of 0.33.0: loading executed with its own classes on faked sm90 and sm100
(`tests/engines/RESULTS.md`), whose error texts these are; rules read in
`vllm/model_executor/layers/quantization`.
"""

import re
from collections.abc import Mapping
from functools import partial
from operator import eq

from ...drafts.engine_traits import Finding
from ...drafts.fused import QKV
from .. import mtp
from ..contract import UNKNOWN_FIRST_LAYER, Module, Question, UnsureError
from ..engine import ExcludeRule
from ..exclude_keys import Patterns, auto_round_in_vllm, gptq_by_lists
from ..layer_linears import layer_linears
from ..linear_scheme import LinearScheme
from ..name_patterns import (
    SOME_PARTS,
    Matching,
    exact_or_regex,
    substring,
    substring_or_wildcard,
    whole_or_parts,
)
from ..transforms import is_transformed
from ..whole_blocks import block_problem, cut_groups, group_problem
from .kernels import awq_problem, integer_problem, marlin_block_problem, powers_problem
from .quantized_head import head_problem

_NUMBER = re.compile(r"layers(?:\.|\\\.)(\d+)")
_PARTS_OF_BLOCKS = frozenset({"fp8"})
"""Each quant_method whose fused linears are built although their parts are no whole blocks."""
_PADDED_BLOCKS = frozenset({"modelopt fp8 block none"})
"""Signatures whose rows are padded to whole blocks."""
_BY_QUARK_ITSELF = "quark mxfp4 "
"""Begins signatures whose step after loading may want Quark, or what a linear has not."""
_TILES_OF_128 = frozenset({("compressed-tensors int4 group128 token-dynamic", "sm90")})
"""(signature, GPU) whose only kernel takes weights that are whole tiles."""
_SOME_SHARDS = (
    "Found different quantization schemes for the shards of {}. vLLM requires all to use the same"
    " scheme."
)
_NOT_ALIGNED = (
    "ValueError: The input size is not aligned with the quantized weight shape. This can be caused"
    " by too large tensor parallel size."
)
_SPLIT_GROUPS: Mapping[str, str] = {
    "auto-round awq-int4": _NOT_ALIGNED,
    "awq int4": _NOT_ALIGNED,
    "modelopt nvfp4": "ValueError: Unsupported model when in features size is not multiple of 16",
    "quark int4": f"{_NOT_ALIGNED} input_size_per_partition={{columns}},"
    " group_size={group_size}.",
    "quark uint4": f"{_NOT_ALIGNED} input_size_per_partition={{columns}},"
    " group_size={group_size}.",
    "quark mxfp4": "ValueError: OCP MX linear layer '{prefix}' has an input size per partition of"
    " {columns}, which must be divisible by the OCP MX group size 32.",
}
_DROPPED_GROUPS = frozenset({"compressed-tensors mxfp4"})


def modules(question: Question) -> tuple[Module, ...]:
    """Parameters count the draft's layers from 0, excludes are held against target's + own.

    A language model counts its own alone, below the name that it is built under
    (`v1/worker/gpu/spec_decode/standalone_ar/speculator.py:129`).
    """
    if question.own.mtp is not None:
        return mtp.modules(question, question.own.mtp, lambda fused: fused.vllm)
    whole = question.traits.whole_model
    first = 0 if whole else question.first_layer or UNKNOWN_FIRST_LAYER
    root = "draft_model." if whole else ""
    layers = [
        Module(
            f"model.layers.{i}.{path}",
            f"{root}model.layers.{first + i}.{_excluded_as(question, path)}",
            parts,
            sharding,
        )
        for i in range(question.num_layers)
        for path, parts, sharding in layer_linears(
            question.traits, f"layers.{i}", lambda fused: fused.vllm
        )
    ]
    extra = [
        Module(
            f"model.{each.name}",
            f"model.{each.name}" if each.is_head else each.name,
            (each.name,),
            "replicated",
        )
        for each in question.traits.extra_linears
    ]
    head = Module("lm_head", f"{root}lm_head", ("lm_head",), "column")
    return (
        *layers,
        *([Module("model.fc", "model.fc", ("fc",), "replicated")] if question.fuses else []),
        *extra,
        *([head] if question.has_head else []),
    )


def _excluded_as(question: Question, path: str) -> str:
    """`qwen3_eagle3.py` builds qkv_proj again, and forgets that it is part of self_attn."""
    forgets = question.traits.vllm.forgets_attention and question.normed_heads
    return QKV.vllm if forgets and path.endswith(QKV.vllm) else path


# Without a list of fused parts q_proj says nothing about qkv_proj: `Question.names_of_parts`.


def _excluded(
    matched: Matching, error: str, question: Question, module: Module, patterns: Patterns
) -> bool | Finding:
    _check_numbers(question, patterns)
    parts = question.names_of_parts(module)
    return whole_or_parts(matched, patterns, module, parts, error)


_exact = partial(_excluded, eq, SOME_PARTS)
_exact_or_regex = partial(_excluded, exact_or_regex, _SOME_SHARDS)


def _substring(question: Question, module: Module, patterns: Patterns) -> bool | Finding:
    if question.declaration and not question.declaration.keys.get("modules_to_not_convert"):
        patterns = _unpacked(question)
    return _excluded(substring, SOME_PARTS, question, module, patterns)


def _substring_or_wildcard(
    question: Question, module: Module, patterns: Patterns
) -> bool | Finding:
    named: bool | Finding = False
    if question.traits.drafts_blocks:
        patterns = _mapped(question, patterns)
    else:
        named = _exact(question, module, patterns)
    return named or any(substring_or_wildcard(pattern, module.prefix) for pattern in patterns)


EXCLUDE_RULES: Mapping[str, ExcludeRule] = {
    "quark": _exact_or_regex,
    "compressed-tensors": _exact_or_regex,
    "fp8": _exact,
    "awq": _substring,
    "modelopt": _substring_or_wildcard,
    "gptq": gptq_by_lists,
    "auto-round": auto_round_in_vllm,
}


def _mapped(question: Question, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """`map_draft_quant_config`: for DFlash in ModelOpt's layout, names on disk become runtime's."""
    first = question.first_layer or UNKNOWN_FIRST_LAYER
    mapped = []
    for pattern in patterns:
        tree = len(pattern) >= 2 and pattern.endswith("*") and not pattern.endswith(".*")
        for name in (pattern[:-1], f"{pattern[:-1]}.*") if tree else (pattern,):
            own = re.sub(
                r"^((?:model\.)?\*?)layers\.(\d+)(?=\.|\*|$)",
                lambda match: f"{match[1]}layers.{int(match[2]) + first}",
                name,
            )
            rooted = own.startswith("*") or re.match(r"model(?:\.|\*|$)", own)
            mapped.append(own if rooted else f"model.{own}")
    return tuple(mapped)


def _check_numbers(question: Question, patterns: tuple[str, ...]) -> None:
    """A number below the draft's own layers cannot be one of the runtime's.

    Raises:
        UnsureError: a pattern names a layer by a number that depends on the target.
    """
    for pattern in patterns if question.first_layer is None else ():
        for number in _NUMBER.findall(pattern):
            if int(number) >= question.num_layers:
                raise UnsureError(
                    f"The exclude {pattern!r} names layer {number}: vLLM counts the draft's layers"
                    " after the target's, whose number is not known here (--target-layers)"
                )


def _unpacked(question: Question) -> tuple[str, ...]:
    """AWQ without a list: what has a plain weight is not quantized."""
    names = question.tensor_names
    return tuple(
        name.removesuffix(".weight")
        for name in names
        if name.endswith(".weight") and f"{name.removesuffix('.weight')}.qweight" not in names
    )


def module_problem(
    question: Question, module: Module, scheme: LinearScheme, shapes: list[tuple[int, int]]
) -> Finding | None:
    """What the kernels of one quantized module, `shapes` per shard, ask of its shape."""
    rows, columns = sum(count for count, _ in shapes), shapes[0][1]
    if question.tp > 1 and is_transformed(question, module.prefix):
        text = "NotImplementedError: Online transforms with tensor parallelism is not supported"
        return Finding("init", text, "serve the draft on one GPU, or quantize without transforms")
    tiles = (scheme.signature, question.arch) in _TILES_OF_128
    if tiles and (rows % 128 or columns % 128):
        return Finding(
            "init",
            "ValueError: Failed to find a kernel that can implement the WNA16 linear layer."
            " Reasons: CutlassW4A8LinearKernel cannot implement due to: K and N must be"
            f" divisible by 128, got {(columns, rows)}",
            f"keep {module.leaf} in BF16, or quantize to FP8: recipe fp8-ptpc",
        )
    if scheme.signature in _PADDED_BLOCKS:
        return _modelopt_block_problem(module, scheme, [count for count, _ in shapes], columns)
    problem = (
        head_problem(question, module, scheme)
        or _mxfp4_problem(module, scheme)
        or powers_problem(module, scheme, columns)
    )
    if problem is not None:
        return problem
    if scheme.granularity == "block":
        problem = _block_problem(question, module, scheme, shapes)
        return problem or marlin_block_problem(question, module, scheme)
    problem = (
        integer_problem(question, module, scheme, rows, columns)
        or cut_groups(module, scheme, columns)
        or awq_problem(question, module, scheme)
    )
    return problem or group_problem(module, scheme, columns, _SPLIT_GROUPS, _DROPPED_GROUPS)


def _modelopt_block_problem(
    module: Module, scheme: LinearScheme, parts: list[int], columns: int
) -> Finding | None:
    """Rows are padded to whole blocks, columns are not."""
    high, wide = scheme.block
    if columns % wide == 0:
        return _parts_problem(module, parts, high)
    text = f"ValueError: FP8_PB_WO requires in divisible by {wide}, got {columns}"
    return Finding("init", text, f"keep {module.leaf} in BF16")


def _mxfp4_problem(module: Module, scheme: LinearScheme) -> Finding | None:
    """Steps after loading of Quark's MXFP4 that want what a linear has not, or Quark itself."""
    if not scheme.signature.startswith(_BY_QUARK_ITSELF):
        return None
    if module.leaf == "kv_b_proj":
        text = "ImportError: The package `amd-quark` is required to use MX-FP4 models."
        return Finding("after load", text, "exclude kv_b_proj, or install amd-quark")
    if module.leaf == "fc" and not scheme.signature.endswith("tensor-static"):
        text = "'ReplicatedLinear' object has no attribute 'output_size_per_partition'"
        return Finding("after load", f"AttributeError: {text}", f"exclude {module.leaf}")
    return None


def _block_problem(
    question: Question, module: Module, scheme: LinearScheme, shapes: list[tuple[int, int]]
) -> Finding | None:
    """Fused linears that are let through have too few rows of scales then."""
    parts = [rows for rows, _ in shapes]
    let_through = question.method in _PARTS_OF_BLOCKS and len(parts) > 1
    high, _ = scheme.block
    if not let_through or not any(rows % high for rows in parts):
        return block_problem(question, module, shapes, scheme.block)
    return _parts_problem(module, parts, high)


def _parts_problem(module: Module, parts: list[int], high: int) -> Finding | None:
    """Scales of a fused linear whose parts end in the middle of blocks, of so many rows."""
    if not any(rows % high for rows in parts[:-1]):
        return None
    start, size = (-(-count // high) for count in (sum(parts[:-1]), sum(parts)))
    return Finding(
        "load",
        f"RuntimeError: start ({start}) + length (1) exceeds dimension size ({size}).",
        f"quantize {module.leaf} per channel: its parts are no whole blocks of {high} rows",
    )
