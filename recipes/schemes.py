"""Schemes and algorithms of other tools, by the rows of `schemes.toml`, which has the sources."""

from collections.abc import Mapping
from dataclasses import dataclass

from .decode import nearest
from .errors import RecipeError
from .packages import table_beside
from .schema import ALGORITHMS, Algorithm, BackendName, RoundingChoice, ScaleChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a backend does not run an algorithm, and what to use instead."""

    reason: str
    fix: str


_ROWS = table_beside(__file__)
FIRST_RECIPES: Mapping[str, str] = _ROWS["first_recipes"]
"""GPU -> the recipe to begin with there."""
LIKE: Mapping[str, str] = _ROWS["like"]
"""GPU on which no engine was run -> one of these with the same number formats."""
OTHER_GPUS = ("a100", "gfx942", "gfx950", "sm80", "sm90", "sm100")
"""Schemes that no user should start with."""
SAME: Mapping[str, str] = _ROWS["same"]
"""Scheme -> the recipe with the same number formats of weights and inputs."""
DIFFERENT: Mapping[str, str] = {
    name: row["use"] for row in _ROWS["different"] for name in row["names"].split()
}
"""Scheme that no built-in recipe matches -> the nearest one, and what differs."""
ABSENT_FORMATS: Mapping[str, str] = {
    name: row["use"] for row in _ROWS["absent"] for name in row["names"].split()
}
"""Number format that no recipe can name -> the nearest one."""
REFUSED: Mapping[tuple[str, str], Refusal] = {
    (backend, algorithm): Refusal(reason=row["reason"], fix=row.get("fix", _ROWS["instead"]))
    for row in _ROWS["refused"]
    for backend in row["backends"]
    for algorithm in row["algorithms"]
}
"""By backend and algorithm: the toolkit's name for it, a recipe's `scale`, `rounding` or both."""
_CORRECTED = Refusal(
    reason="only draftquant's own backend (torch) corrects weights for the rounding of their"
    " inputs: a toolkit takes scales and quantized values of one and the same weight",
    fix="use --backend torch, or --input-correction off (in a recipe: 'input_correction: off')",
)
VENDOR_ALGORITHMS: Mapping[str, tuple[ScaleChoice, RoundingChoice]] = {
    **ALGORITHMS,
    "gptq": ("absmax", "gptq"),
}
"""The names of `ALGORITHMS` as Quark and ModelOpt run them: their GPTQ takes absmax scales."""


def spelled(name: str) -> str:
    """A scheme's name as the two tables spell it: `mtq.FP8_DEFAULT_CFG` is `fp8_default`."""
    return name.lower().replace("-", "_").removeprefix("mtq.").removesuffix("_cfg")


def refusal(backend: BackendName, algorithm: Algorithm) -> Refusal | None:
    """Why a backend does not run a recipe's algorithm; None where it does."""
    both = f"{algorithm.scale} {algorithm.rounding}"
    words = (both, algorithm.rounding, algorithm.scale)
    refused = next((refused for word in words if (refused := REFUSED.get((backend, word)))), None)
    corrects = algorithm.input_correction == "auto" and backend != "torch"
    return refused or (_CORRECTED if corrects else None)


def named_algorithm(name: str, backend: BackendName) -> tuple[ScaleChoice, RoundingChoice]:
    """Scale and rounding of the command line's algorithm `name`, as a backend runs it."""
    refused = REFUSED.get((backend, name))
    if refused is not None:
        raise RecipeError(f"--algorithm {name}, backend {backend}", refused.reason, fix=refused.fix)
    known = ALGORITHMS if backend == "torch" else VENDOR_ALGORITHMS
    if name not in known:
        what = f"no algorithm is called {name!r}"
        raise RecipeError("--algorithm", what, fix=nearest(name, known))
    return known[name]
