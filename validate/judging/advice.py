"""What to do about a verdict: ways out, one a line, most of them with a command to copy.

A way out is a sentence, or a sentence and a command: "Judge them: draftquant gate BF16 ...". Words
in capitals stand for what only the reader knows.
"""

from collections.abc import Sequence

from ...recipes.formats import NUMBER_FORMATS
from ..counting.paired_change import RequiredPrompts
from .anomalies import Background
from .interim_analysis import Look
from .policy import Policy
from .verdict import Wording

MOST_PROMPTS = 10_000
"""Nobody records more, so that no larger number is advised."""
_NEEDS_TRACES = ("-gptq", "-learned")
"""How the built-in recipes end that calibrate on traces."""

_MORE_ROWS = (
    "Keep more rows of the head; what each size costs is shown by: draftquant vocab BF16 --traces"
    " CALIBRATION --curve"
)
_FP4_WEIGHTS = (
    "Keep the inputs in BF16 and round the FP4 weights by GPTQ: draftquant quantize BF16{}"
)
"""What passes where FP4 inputs lose too much, learned or not."""


def lines(*ways: str) -> str:
    """Ways out, one a line."""
    return "\n".join(ways)


def lose_less(background: Background) -> tuple[str, ...]:
    """How the candidate may lose less."""
    if not background.quantized:
        return (_MORE_ROWS,)
    algorithm, recipes = background.algorithm_to_try, background.recipes_to_try
    recipes = tuple(sorted(recipes, key=_is_learned))
    ways = [f"{_promise(name)}: draftquant quantize BF16{_options(name)}" for name in recipes]
    fp4_weights = [
        f"{dtype}-weights-gptq"
        for dtype, number in NUMBER_FORMATS.items()
        if number.is_fp4 and any(_is_learned(name) and dtype in name for name in recipes)
    ]
    ways[:0] = [_FP4_WEIGHTS.format(_options(name)) for name in fp4_weights]
    if algorithm and not any(name.endswith(_NEEDS_TRACES) for name in recipes):
        ways.insert(
            0,
            f"Round its four bits with {algorithm} on traces of other prompts: draftquant quantize"
            f" BF16 --recipe RECIPE --algorithm {algorithm} --traces CALIBRATION --out OUT",
        )
    if background.cut:
        ways.append(_MORE_ROWS)
    if not recipes:
        ways.append("Use a wider format.")
    ways.append(_compare((*fp4_weights, *recipes)))
    return tuple(ways)


def more_prompts(
    required: RequiredPrompts,
    *,
    least: int | None,
    policy: Policy,
    look: Look | None,
    background: Background,
    wording: Wording,
) -> str:
    """What to do where these prompts do not decide.

    Args:
        least: that the policy asks for, whatever these show; None where they are enough.
        look: which planned interim analysis this is; None for a single one.
        background: says how the candidate may lose less.
        wording: of the way in which drafts are counted.
    """
    if look is not None and not look.is_last:
        return _next_look(look, wording)
    if least is None and not _is_feasible(required.as_measured):
        near = f"so near the limit that more than {MOST_PROMPTS:,} would be needed."
        no_help = (
            "most likely not help: the measured change is itself beyond the limit."
            if required.as_measured is None
            else f"hardly help: the measured change is {near}"
        )
        return lines(f"More prompts will {no_help}", *lose_less(background))
    once = 100 * (1 - policy.confidence)
    return lines(
        f"{wording.take} {_number(required, least)}: {wording.count}",
        "Judge them alone and only once, because each further try adds up to"
        f" {once:.2g}% false passes: {wording.gate}",
        "If you want to judge several times while you add prompts, plan that before the first"
        f" time: {wording.gate} --look 1/3",
        *(f"Or {way[0].lower()}{way[1:]}" for way in lose_less(background)),
    )


def fresh_prompts(number: str, wording: Wording) -> str:
    """Ways to another set of prompts, and to its verdict.

    Args:
        number: how many, with what they are: "60 fresh prompts or more".
        wording: of the way in which drafts are counted.
    """
    return lines(f"{wording.take} {number}: {wording.count}", f"Judge them: {wording.gate}")


def _promise(recipe: str) -> str:
    if recipe.endswith(_NEEDS_TRACES):
        return f"Take the recipe {recipe}, whose rounding is calibrated on traces"
    return "Take a wider format, FP8"


def _options(recipe: str) -> str:
    traces = " --traces CALIBRATION" if recipe.endswith(_NEEDS_TRACES) else ""
    return f" --recipe {recipe}{traces} --out OUT"


def _compare(recipes: Sequence[str]) -> str:
    """How to choose among recipes: those that may lose less, or those for the GPU."""
    of = "by the recipes that 'draftquant recipes list --gpu GPU' names"
    outs = "OUT1 OUT2"
    if recipes:
        of = "by " + " and ".join(filter(None, (", ".join(recipes[:-1]), recipes[-1])))
        outs = " ".join(f"OUT{number}" for number, _ in enumerate(recipes, start=1))
    return (
        f"Compare drafts {of} with this one, on prompts that neither calibrated them nor will"
        f" judge them: draftquant compare BF16 QUANT {outs} --traces OTHERS"
    )


def _is_learned(recipe: str) -> bool:
    """As the built-in recipes are called that calibrate FP4 weights and FP4 inputs."""
    return recipe.endswith("-learned")


def _next_look(look: Look, wording: Wording) -> str:
    following = f"{look.number + 1}/{look.total}"
    spending = "" if look.spending == "obrien-fleming" else f" --spending {look.spending}"
    return lines(
        f"{wording.take} as many fresh prompts as were added at each planned analysis:"
        f" {wording.count}",
        *wording.join,
        f"Judge all of them as planned interim analysis {look.number + 1} of {look.total}:"
        f" {wording.gate_joined} --look {following}{spending}",
    )


def _is_feasible(number: int | None) -> bool:
    return number is not None and number <= MOST_PROMPTS


def _number(required: RequiredPrompts, least: int | None) -> str:
    """About how many, and between which numbers; all are `MOST_PROMPTS` at most."""
    if least is not None and not _is_feasible(required.as_measured):
        number = min(required.if_unchanged, MOST_PROMPTS)
        passes = f" (with about {number:,}, a draft that lost nothing passes)"
        return f"{least:,} fresh prompts or more{passes if number > least else ''}"
    assert required.fewest is not None  # of a smaller loss than the measured one
    assert required.as_measured is not None
    if required.fewest == required.most:
        return f"{required.fewest:,} fresh prompts or more"
    most = f"more than {MOST_PROMPTS:,}"
    if _is_feasible(required.most):
        most = f"{required.most:,}"
    return (
        f"about {required.as_measured:,} fresh prompts ({required.fewest:,} if the draft loses less"
        f" than was measured, {most} if it loses more)"
    )
