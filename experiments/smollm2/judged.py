"""What is recorded with SmolLM2, and which quantized drafts are judged on it."""

from collections.abc import Iterator

from draftquant.scripts.dev.docs.choices import choices
from drafts import DRAFTS
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
DEPTHS = {
    name: trained.num_draft_tokens
    for base, trained in DRAFTS.items()
    for name in (base, f"{base}-cut")
}
"""K of each draft."""
_WEIGHTS = (
    "int4-channel", "int4-channel-gptq", "mi325x-w4a8", "mi325x-w4a8-gptq", "int8-channel",
    "nvfp4-weights", "nvfp4-weights-gptq", "mxfp4-weights", "mxfp4-weights-gptq",
    "mi355-w4a8-gptq", "blackwell-fp8", "blackwell-nvfp4", "mi355-mxfp4",
)  # fmt: skip
_HEADS = ("fp8-ptpc-head", "int8-channel-head", "int4-channel-gptq-head")


def advised() -> tuple[str, ...]:
    """Recipes of README's table."""
    return tuple(dict.fromkeys(
        recipe for each in choices() for recipe in (each.fp8, each.int4, each.fp4) if recipe
    ))  # fmt: skip


def _cases() -> Iterator[Case]:
    for name in (*dict.fromkeys((*advised(), *_WEIGHTS)), *_HEADS):
        of_pair = {"draft": "eagle3-cut", "judged_on": "shipped-gate"}
        yield of_recipe("the pair that ships", name, "shipped-calibration", **of_pair)
    for draft in ("eagle3-cut", "eagle3", "dflash"):
        for name in dict.fromkeys((*advised(), *_WEIGHTS)):
            yield of_recipe("recipes", name, draft=draft)
    for name in _HEADS:
        yield of_recipe("head", name, draft="eagle3-cut")
    for seen in ("16", "256"):
        for name in ("int4-channel-gptq", "mi325x-w4a8-gptq"):
            yield of_recipe("calibration", name, f"calibration-{seen}", draft="eagle3-cut")


CASES = tuple(_cases())
