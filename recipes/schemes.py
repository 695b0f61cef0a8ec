"""Names of quantization schemes in other tools, and the built-in recipe that each of them is here.

Sources: `PRESET_SCHEMES` of compressed-tensors 0.20 (llm-compressor's schemes), the configs of
`modelopt.torch.quantization` 0.47 and the names of its `--qformat`, `LLMTemplate` of Quark 0.13,
and the quantization methods of vLLM 0.33 and SGLang 0.5. A scheme is a number format: weights,
inputs, granularity. Where the files are stored in another layout than the tool's own, engines read
the same numbers from them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .decode import nearest
from .errors import RecipeError
from .schema import ALGORITHMS, Algorithm, BackendName, RoundingChoice, ScaleChoice

SAME: Mapping[str, str] = {
    # llm-compressor, compressed-tensors, AutoRound
    "fp8_dynamic": "fp8-ptpc",
    "w4a16": "int4-group128",
    "nvfp4": "blackwell-nvfp4",
    "nvfp4a16": "nvfp4-weights",
    "mxfp4": "mi355-mxfp4",
    "mxfp4a16": "mxfp4-weights",
    # ModelOpt
    "fp8_default": "blackwell-fp8",
    "fp8_per_channel_per_token": "blackwell-fp8-mla",
    "fp8_pc_pt": "blackwell-fp8-mla",
    "nvfp4_default": "blackwell-nvfp4",
    "w4a16_nvfp4": "nvfp4-weights",
    "mxfp4_default": "mi355-mxfp4",
    "int4_blockwise_weight_only": "int4-group128",
    # Quark
    "ptpc_fp8": "mi325x-fp8",
    "int4_wo_128": "int4-group128",
    "int4_wo_per_channel": "int4-channel",
    "mxfp4_weight_only": "mxfp4-weights",
    # SGLang
    "w8a8_fp8": "fp8-ptpc",
}
"""Scheme -> the recipe with the same number formats of weights and inputs, as a test proves."""


def _all(names: str, fix: str) -> Iterable[tuple[str, str]]:
    return ((name, fix) for name in names.split())


_FEW_BITS = (
    "no layout here packs 2 or 3 bits: SGLang refuses them in these, and vLLM has kernels for them"
    " on NVIDIA GPUs only (Humming)"
)
_SYMMETRIC = (
    "no layout here stores zero points. Smaller groups, or GPTQ, win back what one symmetric scale"
    " loses"
)

DIFFERENT: Mapping[str, str] = dict(
    (
        *_all(
            "int8 w8a8 w8a16 w8a8_int8 int8_default int8_smoothquant int8_sq int8_weight_only"
            " int8_wo int8_w8a8",
            "use 'fp8-ptpc': draftquant has no INT8, and FP8 has the same size",
        ),
        *_all(
            "fp8 fp8_static w_fp8_a_fp8",
            "use 'fp8-ptpc' (one scale per output channel and per token, needs no traces), or"
            " 'blackwell-fp8' (one scale per tensor, static inputs, needs traces)",
        ),
        *_all(
            "fp8_block fp8_2d_blockwise_weight_only fp8_pb_wo",
            "use 'fp8-ptpc': no built-in recipe has scales per block of 128x128. A recipe file of"
            " yours may have them (granularity: block)",
        ),
        *_all(
            "w4a16_asym uint4_wo_32 uint4_wo_64 uint4_wo_128 uint4_wo_per_channel",
            f"use 'int4-group128' or 'int4-group128-gptq', which are symmetric: {_SYMMETRIC}",
        ),
        *_all(
            "int4_wo_32 int4_wo_64",
            "use 'int4-group128', or a recipe file that extends it with another group_size",
        ),
        *_all(
            "awq int4_awq w4a16_awq awq_marlin",
            "use 'mi325x-int4-awq': it writes AWQ's files, with scales by absmax. The search of"
            " AWQ, which scales the inputs, is not offered",
        ),
        *_all(
            "w4a8 w4a8_int8 int4_wa_64",
            "use 'int4-group128', whose inputs stay in BF16, or 'mi325x-w4a8', whose inputs are"
            " FP8: draftquant has no INT8",
        ),
        *_all(
            "w4afp8",
            "use 'int4-group128' (the same weights, and inputs in BF16) or 'fp8-ptpc' (FP8 weights"
            " and inputs): no built-in recipe has groups of INT4 beside FP8 inputs. A recipe file"
            " of yours may have them",
        ),
        *_all(
            "int4_fp8",
            "use 'mi325x-w4a8': INT4 with one rounding instead of Quark's two, and FP8 inputs with"
            " one scale per token instead of per tensor",
        ),
        *_all(
            "w4a8_awq_beta w4a8_awq",
            "use 'int4-group128', whose inputs stay in BF16, or 'mi325x-w4a8', whose FP8 inputs are"
            " scaled per token: neither has the factors of AWQ",
        ),
        *_all(
            "nvfp4_weight_only nvfp4_wo",
            "use 'nvfp4-weights', or 'nvfp4-weights-gptq' if you have traces",
        ),
        *_all(
            "nvfp4_awq nvfp4_awq_lite nvfp4_awq_clip nvfp4_awq_full nvfp4_svdquant_default"
            " nvfp4_svdquant",
            "use 'nvfp4-weights-gptq', or 'blackwell-nvfp4-learned' for FP4 inputs too: AWQ and"
            " SVDQuant change more than the quantized weights, and engines would not load the rest",
        ),
        *_all(
            "mxfp4xfp8 mxfp4_fp8 w4a8_mxfp4_fp8 w4a8_nvfp4_fp8",
            "use 'mxfp4-weights-gptq' or 'nvfp4-weights-gptq', whose inputs stay in BF16, or"
            " 'mi325x-w4a8-gptq', which has INT4 weights and FP8 inputs",
        ),
        *_all(
            "mxfp8 mxfp8_default mxfp8a16 mxint8_default",
            "use 'fp8-ptpc': draftquant has no MXFP8 and no MXINT8, and FP8 has the same size",
        ),
        *_all(
            "mxfp6 mxfp6_default mxfp6a16 mxfp6a8 mxfp6_e3m2 mxfp6_e2m3 mxfp4_mxfp6_e2m3",
            "use 'fp8-ptpc' or 'mi355-mxfp4': draftquant has no MXFP6",
        ),
        *_all(
            "w2a4 w2a8 w2a16 w3a4 w3a8 w3a16 int2 int3 uint2 uint3",
            f"use 'int4-group128-gptq': {_FEW_BITS}",
        ),
        *_all(
            "nvfp4_four_over_six nvfp4_w4a4_weight_mse_fp8_sweep",
            "use 'blackwell-nvfp4' with --algorithm mse, which searches the scale of each group"
            " from absmax to four over six",
        ),
        *_all(
            "w4a4 w5a8 w5a16 w6a8 w6a16 w7a8 w7a16",
            "use 'int4-group128', 'mi325x-w4a8' or 'fp8-ptpc': weights have 4 or 8 bits here, and"
            " inputs are FP8, FP4 or BF16",
        ),
        *_all(
            "nf4 bnb bitsandbytes",
            "use 'int4-group128': the same size, with evenly spaced values that engines load",
        ),
    )
)
"""Scheme that no built-in recipe is -> the nearest one, and what differs."""

ABSENT_FORMATS: Mapping[str, str] = {
    "int8": "write fp8_e4m3, which has the same size: draftquant has no INT8",
    **dict(_all("int2 int3 uint2 uint3", f"write int4: {_FEW_BITS}")),
    "uint4": f"write int4 and symmetric: true: {_SYMMETRIC}",
}
"""Number format that no recipe can name -> the nearest one; `int4` is spelled more alike."""


def spelled(name: str) -> str:
    """A scheme's name as the two tables have it: `mtq.FP8_DEFAULT_CFG` is `fp8_default`."""
    return name.lower().replace("-", "_").removeprefix("mtq.").removesuffix("_cfg")


VENDOR_ALGORITHMS: Mapping[str, tuple[ScaleChoice, RoundingChoice]] = {
    **ALGORITHMS,
    "gptq": ("absmax", "gptq"),
}
"""The names of `ALGORITHMS` as Quark and ModelOpt carry them: their GPTQ takes absmax scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a backend does not run an algorithm, and what to use instead."""

    reason: str
    fix: str


_INSTEAD = (
    "use --algorithm gptq or --algorithm learned (in a recipe: 'rounding:"
    " gptq', 'rounding: learned') with backend torch: both use the linears'"
    " inputs too, and change only quantized values and scales"
)
_FOLDED = Refusal(
    reason="Quark 0.13 scales the inputs of linears and folds the factors into the one"
    " module in front of a linear. In EAGLE-3, q, k and v read two norms side"
    " by side, and Quark stops with a size mismatch. Elsewhere it changes norms,"
    " which a recipe keeps byte for byte",
    fix=_INSTEAD,
)
_LEARNED = Refusal(
    reason="only draftquant's own backend (torch) can learn the rounding: a toolkit"
    " does not run the draft's steps one after the other",
    fix="use --backend torch (in a recipe: 'backend: torch')",
)
_OWN_SCALES = Refusal(
    reason="this toolkit's GPTQ always takes absmax scales",
    fix="use --algorithm gptq (in a recipe: 'scale: absmax'), or --backend torch",
)
_CORRECTED = Refusal(
    reason="only draftquant's own backend (torch) corrects weights for the rounding of their"
    " inputs: a toolkit takes scales and quantized values of one and the same weight",
    fix="use --backend torch, or --input-correction off (in a recipe: 'input_correction: off')",
)
_NOT_OURS = Refusal(reason="draftquant does not implement this algorithm", fix=_INSTEAD)

REFUSED: Mapping[tuple[str, str], Refusal] = {
    ("torch", "awq"): _NOT_OURS,
    ("torch", "smoothquant"): _NOT_OURS,
    ("torch", "svdquant"): _NOT_OURS,
    ("quark", "awq"): _FOLDED,
    ("quark", "smoothquant"): _FOLDED,
    ("quark", "svdquant"): Refusal(
        reason="Quark 0.13 keeps a low-rank part of each weight beside the quantized"
        " values, and no layout declares it: an engine would serve the weight"
        " without that part",
        fix=_INSTEAD,
    ),
    ("quark", "mse"): Refusal(
        reason="Quark 0.13 does not search scales per row or group, and it searches the"
        " scale of a matrix for each weight alone, while engines load fused linears"
        " under one scale",
        fix="use --backend torch, or --algorithm absmax (in a recipe: 'scale: absmax')",
    ),
    ("quark", "mse gptq"): _OWN_SCALES,
    ("quark", "learned"): _LEARNED,
    ("modelopt", "awq"): Refusal(
        reason="ModelOpt 0.47 stores a pre_quant_scale beside the quantized values, by"
        " which inputs have to be multiplied. A declaration of FP8 or NVFP4 does not"
        " mention it, so engines do not multiply. Where ModelOpt folds it into a"
        " norm instead, it changes norms, which a recipe keeps byte for byte",
        fix=_INSTEAD,
    ),
    ("modelopt", "smoothquant"): Refusal(
        reason="ModelOpt 0.47 smooths INT8 only, which no recipe has. With FP8 it changes"
        " no weight, but it exports one input_scale per input where its declaration"
        " says one per tensor",
        fix=_INSTEAD,
    ),
    ("modelopt", "svdquant"): Refusal(
        reason="ModelOpt 0.47 takes a low-rank part out of each weight. On export it loses"
        " that part (INT4) or stores it under names that engines do not load: they"
        " would serve the weight without it",
        fix=_INSTEAD,
    ),
    ("modelopt", "mse gptq"): _OWN_SCALES,
    ("modelopt", "learned"): _LEARNED,
}
"""By backend and algorithm: the toolkit's name of it, a recipe's `scale`, `rounding` or both."""


def refusal(backend: BackendName, algorithm: Algorithm) -> Refusal | None:
    """Why a backend does not carry a recipe's algorithm; None where it does."""
    both = f"{algorithm.scale} {algorithm.rounding}"
    words = (both, algorithm.rounding, algorithm.scale)
    found = next((found for word in words if (found := REFUSED.get((backend, word)))), None)
    corrects = algorithm.input_correction == "auto" and backend != "torch"
    return found or (_CORRECTED if corrects else None)


def named_algorithm(name: str, backend: BackendName) -> tuple[ScaleChoice, RoundingChoice]:
    """Scale and rounding of what the command line calls `name`, as a backend carries it."""
    refused = REFUSED.get((backend, name))
    if refused is not None:
        raise RecipeError(f"--algorithm {name}, backend {backend}", refused.reason, fix=refused.fix)
    known = ALGORITHMS if backend == "torch" else VENDOR_ALGORITHMS
    if name not in known:
        raise RecipeError(
            "--algorithm", f"no algorithm is called {name!r}", fix=nearest(name, known)
        )
    return known[name]
