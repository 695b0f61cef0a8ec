"""What is recorded with SmolLM2, and which quantized drafts are judged on it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftquant.scripts.dev.docs.choices import choices
from judging import Case, Recording, of_recipe

NEW_TOKENS = 96
RECORDINGS = {
    "gate": Recording(prompts="gate", count=200),
    "calibration-64": Recording(prompts="calibration", count=64),
    "calibration-16": Recording(prompts="calibration", count=16),
    "calibration-256": Recording(prompts="calibration", count=256),
    "choice": Recording(prompts="choice", count=100),
    "shipped-gate": Recording(prompts="shipped/gate", count=96),
    "shipped-calibration": Recording(prompts="shipped/calibration", count=64),
}
DEPTHS = {"shipped": 3, "eagle3": 3, "dflash": 7}
"""K of each draft: of the one in tests/pairs/smollm2, and of those of the work folder."""
_WEIGHTS = (
    "int4-channel", "int4-channel-gptq", "mi325x-w4a8", "mi325x-w4a8-gptq", "int8-channel",
    "nvfp4-weights", "nvfp4-weights-gptq", "mxfp4-weights", "mxfp4-weights-gptq",
    "mi355-w4a8-gptq", "blackwell-fp8", "blackwell-nvfp4", "mi355-mxfp4",
)  # fmt: skip
_HEADS = ("fp8-ptpc-head", "int8-channel-head", "int4-channel-gptq-head")
_KNOWN = {"dflash": ("--expect-baseline", "1.89")}
"""What a draft accepts whose inputs are right, where that is less than drafts usually do."""
HEADS = sorted(str(path) for path in Path(__file__).parent.glob("heads/*.yaml"))
"""Recipes with the layers of `fp8-ptpc` and other heads."""


def advised() -> tuple[str, ...]:
    """Recipes of README's table."""
    return tuple(dict.fromkeys(
        recipe for each in choices() for recipe in (each.fp8, each.int4, each.fp4) if recipe
    ))  # fmt: skip


def _cases() -> Iterator[Case]:
    recipes = tuple(dict.fromkeys((*advised(), *_WEIGHTS, *_HEADS)))
    for name in recipes:
        of_pair = {"draft": "shipped", "judged_on": "shipped-gate"}
        yield of_recipe("the pair that ships", name, "shipped-calibration", **of_pair)
    for draft in DEPTHS:
        more: dict[str, Any] = {"draft": draft, "gate": _KNOWN.get(draft, ())}
        for name in recipes if draft == "shipped" else recipes[: -len(_HEADS)]:
            yield of_recipe("recipes", name, **more)
        for seen in ("16", "256"):
            yield of_recipe("calibration", "int4-channel-gptq", f"calibration-{seen}", **more)
    for head in HEADS:
        seen = "calibration-64" if "gptq" in head else ""
        yield Case(
            question="heads", draft="shipped", quantize=("--recipe", head), calibrated_on=seen
        )


CASES = tuple(_cases())
