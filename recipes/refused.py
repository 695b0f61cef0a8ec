"""What backends are not asked for, and why: algorithms by the names that recipes and users have.

A backend finds codes and scales, and layouts declare these alone. So a toolkit's own algorithm is
run where codes and scales are all that it changes. What it moves into norms, into factors of inputs
or into weights beside the codes would be lost on an engine, and is refused, as is what it lacks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .algorithm import ALGORITHMS, Algorithm, RoundingChoice, ScaleChoice
from .decode import nearest
from .errors import RecipeError
from .schema import BackendName

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
    """Scale and rounding of what the command line calls `name`, as a backend carries it.

    Raises:
        RecipeError: the backend does not run it, or no algorithm has this name.
    """
    refused = REFUSED.get((backend, name))
    if refused is not None:
        raise RecipeError(f"--algorithm {name}, backend {backend}", refused.reason, fix=refused.fix)
    known = ALGORITHMS if backend == "torch" else VENDOR_ALGORITHMS
    if name not in known:
        raise RecipeError(
            "--algorithm", f"no algorithm is called {name!r}", fix=nearest(name, known)
        )
    return known[name]
