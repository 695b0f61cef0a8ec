"""Which recipe for which GPU, engine and family of draft: the table of README and its picture.

A test asks `check` whether each recipe loads where it is named. First comes what loses least
acceptance on the shipped pairs (docs/acceptance.md), then what is smaller.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .markdown import code, table

LLAMA, MLA, DFLASH = "eagle3-llama", "eagle3-mla", "dflash"
EVERY = (LLAMA, MLA, DFLASH)


class Choice(NamedTuple):
    """One row of advice.

    Attributes:
        gpus: as people say them.
        engine: that serves the draft.
        families: of drafts.
        recipe: FP8 weights and inputs, half of the bytes of BF16.
        smaller: recipes with weights of four bits; none where the engine loads none.
    """

    gpus: tuple[str, ...]
    engine: str
    families: tuple[str, ...]
    recipe: str
    smaller: tuple[str, ...]


AMD = ("MI300X", "MI325X")
HOPPER = ("H100", "H200")
CHOICES: Sequence[Choice] = (
    Choice(AMD, "SGLang", EVERY, "mi325x-fp8", ("mi325x-w4a8-gptq",)),
    Choice(AMD, "vLLM", EVERY, "mi325x-fp8", ("int4-channel-gptq",)),
    Choice(("MI355X",), "SGLang", EVERY, "mi325x-fp8", ("mi355-mxfp4-learned",)),
    Choice(HOPPER, "vLLM", (LLAMA, DFLASH), "fp8-ptpc", ("int4-channel-gptq", "hopper-w4a8-gptq")),
    Choice(HOPPER, "vLLM", (MLA,), "fp8-ptpc", ("int4-channel-gptq",)),
    Choice(HOPPER, "SGLang", (LLAMA, DFLASH), "fp8-ptpc", ("int4-channel-gptq",)),
    Choice(HOPPER, "SGLang", (MLA,), "fp8-ptpc", ()),
    Choice(
        ("B200",),
        "vLLM",
        EVERY,
        "blackwell-fp8-mla",
        ("int4-channel-gptq", "blackwell-nvfp4-learned"),
    ),
    Choice(
        ("B200",),
        "SGLang",
        (LLAMA, DFLASH),
        "blackwell-fp8-mla",
        ("int4-channel-gptq", "blackwell-nvfp4-learned"),
    ),
    Choice(("B200",), "SGLang", (MLA,), "blackwell-fp8-mla", ()),
)
ANY = "any of the three"
NONE_SMALLER = "none that it loads"
BY_PLUGIN = ("mi325x-w4a8-gptq",)
"""What no stock engine loads, and an engine with draftquant as its plugin does."""


def with_plugin(recipe: str) -> str:
    """The recipe, and whether it needs the plugin."""
    return f"{recipe} with the plugin" if recipe in BY_PLUGIN else recipe


def choices_table() -> str:
    """The advice as a table."""
    return table(
        ["GPU", "engine", "family of the draft", "begin with (FP8)", "smaller (4-bit weights)"],
        (
            [
                ", ".join(each.gpus),
                each.engine,
                ANY if each.families == EVERY else ", ".join(each.families),
                code(each.recipe),
                ", ".join(_linked(name) for name in each.smaller) or NONE_SMALLER,
            ]
            for each in CHOICES
        ),
    )


def _linked(recipe: str) -> str:
    return with_plugin(recipe).replace(recipe, code(recipe))
