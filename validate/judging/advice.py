"""What a verdict is based on, and what to do about it.

A way out is a sentence, or a sentence and a command: "Judge them: draftquant gate BF16 ...". Words
in capitals stand for what only the reader knows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...recipes.formats import NUMBER_FORMATS
from ..counting.draft_counts import DraftCounts, PromptPair, RecordedPair
from ..counting.paired_change import PairedChange, RequiredPrompts
from .categories import CategoryFigures, Parts
from .policy import Look, Policy, Wording


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """What was checked before the two drafts were replayed; None = not known.

    `other_target` names the target that calibrated the candidate where it is not the traces'.
    `head_agreement` is the share of recorded tokens that the target's head reproduces. A run with
    an entry in `not_compared` cannot pass; `to_compare` says how those tools record it.
    `seen_continuations`: ids of prompts that are judged both ways, because what the target wrote
    there made the candidate too.
    """

    baseline_sha256: str | None = None
    candidate_sha256: str | None = None
    head_agreement: float | None = None
    other_target: str = ""
    expected_baseline: float | None = None
    unrelated: bool = False
    unrecorded: bool = False
    algorithm_to_try: str | None = None
    recipes_to_try: tuple[str, ...] = ()
    cut: bool = False
    quantized: bool = True
    seen_continuations: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    to_compare: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


NO_BACKGROUND = Background()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that a verdict is based on; `incomparable` says why there can be none, "" = there can."""

    baseline: DraftCounts
    candidate: DraftCounts
    incomparable: str
    recorded: Sequence[RecordedPair]
    prompts: tuple[PromptPair, ...]
    change: PairedChange | None
    parts: Parts
    policy: Policy
    look: Look | None
    background: Background
    wording: Wording

    @property
    def declared(self) -> bool:
        """Whether clusters were declared that texts do not show."""
        return any(prompt.cluster != prompt.alike for prompt in self.baseline.prompts)

    @property
    def counted(self) -> str:
        """The number of prompts, in words."""
        clustered = any(prompt.cluster for prompt in self.baseline.prompts)
        unit = "clusters of prompts" if clustered else "distinct prompts"
        return f"{len(self.prompts)} {unit}"

    @property
    def num_prompts(self) -> int:
        """Distinct prompts with verify steps, whatever clusters they form."""
        return len({prompt.prompt_sha256 for prompt, _ in self.recorded})

    @property
    def num_short_prompts(self) -> int:
        """Prompts left out because they have no verify step."""
        return len(self.baseline.prompts) - len(self.recorded)


MOST_PROMPTS = 10_000
"""Nobody records more, so no larger number is advised."""
_NEEDS_TRACES = ("-gptq", "-learned")
"""Endings of the names of built-in recipes that calibrate on traces."""

_MORE_ROWS = (
    "Keep more rows of the head; what each size costs is shown by: draftquant vocab BF16 --traces"
    " CALIBRATION --curve"
)
_BY_OTHER_PROMPTS = (
    "Let prompts that will not judge it choose the recipe: draftquant quantize BF16 --recipe auto"
    " --engine ENGINE --gpu GPU --traces OTHERS --out OUT"
)
_FP4_WEIGHTS = (
    "Keep the inputs in BF16 and round the FP4 weights by GPTQ: draftquant quantize BF16{}"
)
"""Recipe to use where FP4 inputs lose too much, learned or not."""


def lines(*ways: str) -> str:
    """Ways out, one per line."""
    return "\n".join(ways)


def repair(evidence: Evidence, parts: Sequence[CategoryFigures] = ()) -> str:
    """What to do where too much was lost, in these parts too."""
    one_draft = evidence.wording.one_draft
    return one_draft.loses if one_draft else lines(*otherwise_made(evidence, parts))


def otherwise_made(evidence: Evidence, parts: Sequence[CategoryFigures] = ()) -> tuple[str, ...]:
    """How the candidate may lose less, in these parts too; nothing if it is the baseline itself."""
    if evidence.wording.one_draft is not None:
        return ()
    bins = names([part for part in parts if part.is_context_bin])
    others = names([part for part in parts if not part.is_context_bin])
    ways = (
        others and f"Calibrate on other prompts of {others} too.",
        bins and f"Calibrate on other prompts of these lengths too: {bins}.",
    )
    return (*filter(None, ways), *lose_less(evidence.background))


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
        ways.append("Keep the draft in BF16: no recipe is wider than this one.")
    return (*ways, _BY_OTHER_PROMPTS)


def more_prompts(evidence: Evidence, required: RequiredPrompts, least: int | None) -> str:
    """What to do where these prompts do not decide; `least` is the policy's number."""
    look, wording = evidence.look, evidence.wording
    if look is not None and look.number < look.total:
        return _next_look(look, wording)
    if least is None and not _is_feasible(required.as_measured):
        near = f"so near the limit that more than {MOST_PROMPTS:,} would be needed."
        no_help = (
            "most likely not help: the measured change is itself beyond the limit."
            if required.as_measured is None
            else f"hardly help: the measured change is {near}"
        )
        return lines(f"More prompts will {no_help}", *otherwise_made(evidence))
    once = 100 * (1 - evidence.policy.confidence)
    return lines(
        f"{wording.take} {_number(required, least)}: {wording.count}",
        "Judge them alone and only once, because each further try adds up to"
        f" {once:.2g}% false passes: {wording.gate}",
        "If you want to judge several times while you add prompts, plan that before the first"
        f" time: {wording.gate} --look 1/3",
        *(f"Or {way[0].lower()}{way[1:]}" for way in otherwise_made(evidence)),
    )


def fresh_prompts(number: str, wording: Wording) -> str:
    """How to get another set of prompts ("60 fresh prompts or more"), and its verdict."""
    return lines(f"{wording.take} {number}: {wording.count}", f"Judge them: {wording.gate}")


def _promise(recipe: str) -> str:
    if recipe.endswith(_NEEDS_TRACES):
        return f"Take the recipe {recipe}, whose rounding is calibrated on traces"
    return f"Take a wider format, the recipe {recipe}"


def _options(recipe: str) -> str:
    traces = " --traces CALIBRATION" if recipe.endswith(_NEEDS_TRACES) else ""
    return f" --recipe {recipe}{traces} --out OUT"


def _is_learned(recipe: str) -> bool:
    return recipe.endswith("-learned")


def _next_look(look: Look, wording: Wording) -> str:
    following = f"{look.number + 1}/{look.total}"
    spending = "" if look.spending == "obrien-fleming" else f" --spending {look.spending}"
    return lines(
        f"{wording.take} as many fresh prompts as were added at each planned analysis:"
        f" {wording.count}",
        wording.join,
        f"Judge all of them as planned interim analysis {look.number + 1} of {look.total}:"
        f" {wording.gate_joined} --look {following}{spending}",
    )


def _is_feasible(number: int | None) -> bool:
    return number is not None and number <= MOST_PROMPTS


def _number(required: RequiredPrompts, least: int | None) -> str:
    """About how many, and between which numbers; all are at most `MOST_PROMPTS`."""
    if least is not None and not _is_feasible(required.as_measured):
        number = min(required.if_unchanged, MOST_PROMPTS)
        passes = f" (with about {number:,}, a draft that lost nothing passes)"
        return f"{least:,} fresh prompts or more{passes if number > least else ''}"
    assert required.fewest is not None  # for a smaller loss than the measured one
    assert required.as_measured is not None
    if required.fewest == required.most:
        return f"{required.fewest:,} fresh prompts or more"
    far = f"more than {MOST_PROMPTS:,}"
    most = f"{required.most:,}" if _is_feasible(required.most) else far
    return (
        f"about {required.as_measured:,} fresh prompts ({required.fewest:,} if the draft loses less"
        f" than was measured, {most} if it loses more)"
    )


def findings(parts: Sequence[CategoryFigures]) -> str:
    """Each finding with its change and bounds."""
    sentences = []
    for part in parts:
        assert part.change is not None  # it has an outcome, or would have one
        change, lower, upper = part.change.in_percent(part.max_relative_drop)
        sentences.append(
            f"{part.category!r} ({part.num_prompts} prompts) changed by {change},"
            f" bounds {lower} and {upper}"
        )
    return "; ".join(sentences)


def number_of(parts: Sequence[CategoryFigures]) -> str:
    """A category, 2 categories, a category and 2 context bins."""
    bins = sum(part.is_context_bin for part in parts)
    counted = (
        (len(parts) - bins, "a category", "categories"),
        (bins, "a context bin", "context bins"),
    )
    return " and ".join(
        single if number == 1 else f"{number} {several}"
        for number, single, several in counted
        if number
    )


def kinds_of(parts: Sequence[CategoryFigures]) -> str:
    """The category, the context bin, or "category and context bin"."""
    kinds = sorted({part.is_context_bin for part in parts})
    return " and ".join(("category", "context bin")[kind] for kind in kinds)


def names(parts: Sequence[CategoryFigures]) -> str:
    """Names as they are in the report."""
    return ", ".join(repr(part.category) for part in parts)
