"""What backends are not asked for, and why: algorithms by the names that recipes and users have.

A backend finds codes and scales, and layouts declare these alone. So a toolkit's own algorithm is
run where codes and scales are all that it changes. What it moves into norms, into factors of inputs
or into weights beside the codes would be lost on an engine, and is refused, as is what it lacks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .decode import nearest
from .errors import RecipeError
from .schema import ALGORITHMS, Algorithm, BackendName, RoundingChoice, ScaleChoice

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
    "use 'rounding: gptq' or 'rounding: learned' with 'backend: torch' (--algorithm gptq, learned):"
    " they look at the inputs too, and change codes and scales only"
)
_FOLDED = Refusal(
    reason="Quark 0.13 divides inputs and folds the factors into the one module before a linear: q,"
    " k and v of EAGLE-3 read two norms side by side, where it stops with a size mismatch, and"
    " elsewhere it changes norms, which a recipe keeps byte for byte",
    fix=_INSTEAD,
)
_LEARNED = Refusal(
    reason="learned rounding is draftquant's own: the toolkit has none that runs a draft's chain",
    fix="use 'backend: torch' (--backend torch)",
)
_OWN_SCALES = Refusal(
    reason="the toolkit's GPTQ takes absmax scales and has no other choice",
    fix="write 'scale: absmax' (--algorithm gptq), or use 'backend: torch'",
)
_NOT_OURS = Refusal(reason="draftquant computes no such algorithm", fix=_INSTEAD)

REFUSED: Mapping[tuple[str, str], Refusal] = {
    ("torch", "awq"): _NOT_OURS,
    ("torch", "smoothquant"): _NOT_OURS,
    ("torch", "svdquant"): _NOT_OURS,
    ("quark", "awq"): _FOLDED,
    ("quark", "smoothquant"): _FOLDED,
    ("quark", "svdquant"): Refusal(
        reason="Quark 0.13 keeps a low-rank part of each weight beside its codes, which no layout"
        " declares: an engine would serve the rest of the weight alone",
        fix=_INSTEAD,
    ),
    ("quark", "mse"): Refusal(
        reason="Quark 0.13 searches no scales of rows or groups, and that of a matrix for each"
        " weight alone, while engines hold fused linears under one",
        fix="write 'scale: absmax', or use 'backend: torch'",
    ),
    ("quark", "mse gptq"): _OWN_SCALES,
    ("quark", "learned"): _LEARNED,
    ("quark", "retuned"): _LEARNED,
    ("modelopt", "awq"): Refusal(
        reason="ModelOpt 0.47 leaves a pre_quant_scale beside the codes, by which inputs are to be"
        " multiplied: what declares FP8 and NVFP4 does not say so, and engines do not; where it"
        " folds it instead it changes norms, which a recipe keeps byte for byte",
        fix=_INSTEAD,
    ),
    ("modelopt", "smoothquant"): Refusal(
        reason="ModelOpt 0.47 smooths INT8 only, which no recipe has: with FP8 it changes no"
        " weight, and exports an input_scale for each input under a declaration of one",
        fix=_INSTEAD,
    ),
    ("modelopt", "svdquant"): Refusal(
        reason="ModelOpt 0.47 takes a low-rank part out of each weight and loses it on export"
        " (INT4), or exports it under names that engines do not load: they would serve the rest of"
        " the weight alone",
        fix=_INSTEAD,
    ),
    ("modelopt", "mse gptq"): _OWN_SCALES,
    ("modelopt", "learned"): _LEARNED,
    ("modelopt", "retuned"): _LEARNED,
}
"""By backend and algorithm: the toolkit's name of it, a recipe's `scale`, `rounding` or both."""


def refusal(backend: BackendName, algorithm: Algorithm) -> Refusal | None:
    """Why a backend does not carry a recipe's algorithm; None where it does."""
    both = f"{algorithm.scale} {algorithm.rounding}"
    words = (both, algorithm.rounding, algorithm.scale)
    return next((found for word in words if (found := REFUSED.get((backend, word)))), None)


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
