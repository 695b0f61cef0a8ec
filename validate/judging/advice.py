"""What the gate knows beside the counts, which figures cannot be right, and what to do.

A verdict is about quantization only if everything else worked: the baseline as it does elsewhere,
on the features that it was trained to read. Figures that say otherwise are ANOMALOUS, never PASS.

A way out is a sentence, or a sentence and a command: "Judge them: draftquant gate BF16 ...". Words
in capitals stand for what only the reader knows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...calibration.traces.trace_info import MIN_AGREEMENT
from ...recipes.errors import GateError
from ...recipes.formats import NUMBER_FORMATS
from ..counting.draft_counts import DraftCounts
from ..counting.paired_change import RequiredPrompts
from .categories import CategoryFigures
from .policy import Look, Policy, Wording

EXPECTED_WITHIN = 0.05
"""Relative difference up to which `--expect-baseline` confirms a measured acceptance length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """What was looked at before the two drafts were replayed; None = not known.

    Attributes:
        head_agreement: share of recorded tokens that the target's head reproduces.
        expected_baseline: mean acceptance length that the baseline has elsewhere with this K.
        unrelated: the candidate is on purpose not the baseline quantized.
        unrecorded: no record says how the candidate's folder was quantized.
        algorithm_to_try: with which the candidate may lose less, by its name on the command line.
        not_compared: what makes two runs comparable and could not be compared, because files of
            another tool do not hold it: sentences without a full stop. No such run passes.
        to_compare: how those tools keep it, a sentence each.
    """

    baseline_sha256: str | None = None
    candidate_sha256: str | None = None
    head_agreement: float | None = None
    expected_baseline: float | None = None
    unrelated: bool = False
    unrecorded: bool = False
    algorithm_to_try: str | None = None
    recipes_to_try: tuple[str, ...] = ()
    cut: bool = False
    quantized: bool = True
    not_compared: tuple[str, ...] = ()
    to_compare: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


NO_BACKGROUND = Background()


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """Why the figures cannot be right, and what to do; a sentence or two each."""

    reason: str
    action: str


def check_expected_baseline(expected: float | None, num_draft_tokens: int) -> None:
    """Refuse what `--expect-baseline` says (GateError) if it is no acceptance length."""
    if expected is not None and not 1 < expected <= num_draft_tokens + 1:
        raise GateError(
            "--expect-baseline",
            f"expected a mean acceptance length in (1, {num_draft_tokens + 1}] for K ="
            f" {num_draft_tokens}, got {expected}",
            fix="give the acceptance length that the BF16 draft has with this K",
        )


def min_baseline_length(baseline: DraftCounts, policy: Policy) -> float:
    """Shortest mean acceptance length that a working baseline has: 1 + a + a^2 + ... + a^K.

    Drawn text is harder to guess: a draft that proposes its most likely token is right at best as
    often as that token is drawn, which is at least the mean probability of the drawn tokens. So a
    is a share of that. (Drawn proposals lose less, as far as measured: 2.00 where the share gives
    1.15, on the shipped EAGLE-3 pair at temperature 0.8 and top-p 0.95.)
    """
    a = policy.min_step_acceptance * (baseline.text.mean_token_probability or 1.0)
    return sum(a**j for j in range(baseline.num_draft_tokens + 1))


def find_anomaly(
    baseline: DraftCounts, candidate: DraftCounts, policy: Policy, background: Background
) -> Anomaly | None:
    """The first reason why the figures cannot be right, or None."""
    return (
        _anomaly_of_head(background)
        or _anomaly_of_length("baseline", baseline, policy)
        or _anomaly_of_baseline(baseline, policy, background)
        or _anomaly_of_length("candidate", candidate, policy)
    )


def _anomaly_of_head(background: Background) -> Anomaly | None:
    agreement = background.head_agreement
    if agreement is None or agreement >= MIN_AGREEMENT:
        return None
    return Anomaly(
        reason=f"The target's head reproduces only {agreement:.1%} of the recorded tokens from the"
        f" recorded features of its last layer, expected at least {MIN_AGREEMENT:.0%}. The traces"
        " were recorded from another target, or their features do not belong to their tokens.",
        action="Record the traces again, and give the same target to --target.",
    )


def _anomaly_of_baseline(
    baseline: DraftCounts, policy: Policy, background: Background
) -> Anomaly | None:
    """A known acceptance length settles it, else features and length must look right."""
    length, expected = baseline.counts.mean_acceptance_length, background.expected_baseline
    if expected is not None:
        if abs(length / expected - 1) <= EXPECTED_WITHIN:
            return None
        return Anomaly(
            reason=f"The baseline has a mean acceptance length of {length:.4f}, but"
            f" --expect-baseline says {expected:g} (a difference of {EXPECTED_WITHIN:.0%} is"
            " allowed).",
            action="Check K, the target, the prompts, and the baseline's config.json.",
        )
    fault = baseline.text.fault
    if fault is not None:
        return Anomaly(
            reason=f"{fault[0].upper()}{fault[1:]}.",
            action="Record the traces again. If you know that they are right, confirm it with the"
            " acceptance length that the baseline has elsewhere: --expect-baseline AL.",
        )
    floor = min_baseline_length(baseline, policy)
    if length < floor:
        return Anomaly(
            reason=f"The baseline has a mean acceptance length of only {length:.4f}. With K ="
            f" {baseline.num_draft_tokens}, a draft whose inputs are those it was trained on has at"
            f" least {floor:.2f}.",
            action="Check that the draft was trained for this target. If the draft is known to"
            " accept so little elsewhere too, give the known figure: --expect-baseline AL.",
        )
    return None


def _anomaly_of_length(role: str, draft: DraftCounts, policy: Policy) -> Anomaly | None:
    length = draft.counts.mean_acceptance_length
    ceiling = policy.max_ceiling_share * (draft.num_draft_tokens + 1)
    if length < policy.min_acceptance_length:
        return Anomaly(
            reason=f"Almost no token of the {role} is accepted (mean acceptance length"
            f" {length:.4f}). A loss of precision does not do that; the draft was probably loaded"
            " wrongly.",
            action="Check target layers, rope, tensor names and scales with draftquant inspect and"
            " draftquant verify.",
        )
    if length > ceiling:
        return Anomaly(
            reason=f"The mean acceptance length of the {role}, {length:.4f}, is too close to the"
            f" maximum of {draft.num_draft_tokens + 1} (a working draft stays below"
            f" {ceiling:.4f}).",
            action="Look for text that repeats itself, and for prompts that the draft was trained"
            " on.",
        )
    return None


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
    """What to do where these prompts do not decide; `least` is what the policy asks for."""
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
    """Ways to another set of prompts ("60 fresh prompts or more"), and to its verdict."""
    return lines(f"{wording.take} {number}: {wording.count}", f"Judge them: {wording.gate}")


def _promise(recipe: str) -> str:
    if recipe.endswith(_NEEDS_TRACES):
        return f"Take the recipe {recipe}, whose rounding is calibrated on traces"
    return "Take a wider format, FP8"


def _options(recipe: str) -> str:
    traces = " --traces CALIBRATION" if recipe.endswith(_NEEDS_TRACES) else ""
    return f" --recipe {recipe}{traces} --out OUT"


def _compare(recipes: Sequence[str]) -> str:
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


def findings(found: Sequence[CategoryFigures]) -> str:
    """Each with its change and bounds."""
    return "; ".join(map(_finding, found))


def _finding(found: CategoryFigures) -> str:
    assert found.change is not None  # it has an outcome, or would have
    lower, upper = found.change.relative_bounds
    return (
        f"{found.category!r} ({found.num_prompts} prompts) changed by"
        f" {found.change.relative_change:+.2%}, bounds {lower:+.2%} and {upper:+.2%}"
    )


def number_of(found: Sequence[CategoryFigures]) -> str:
    """A category, 2 categories, a category and 2 context bins."""
    of_bins = sum(one.is_context_bin for one in found)
    counted = (
        (len(found) - of_bins, "a category", "categories"),
        (of_bins, "a context bin", "context bins"),
    )
    return " and ".join(
        one if number == 1 else f"{number} {several}" for number, one, several in counted if number
    )


def kinds_of(found: Sequence[CategoryFigures]) -> str:
    """The category, the context bin, or "category and context bin"."""
    kinds = {one.is_context_bin: "context bin" if one.is_context_bin else "category"
             for one in found}  # fmt: skip
    return " and ".join(kinds[kind] for kind in sorted(kinds))


def names(found: Sequence[CategoryFigures]) -> str:
    """As they are in the report."""
    return ", ".join(repr(one.category) for one in found)


def calibrate_on(found: Sequence[CategoryFigures]) -> str:
    """Ways to lose less in these parts, one a line."""
    bins = [one for one in found if one.is_context_bin]
    others = [one for one in found if not one.is_context_bin]
    ways = []
    if others:
        ways.append(f"Calibrate on other prompts of {names(others)} too.")
    if bins:
        ways.append(f"Calibrate on other prompts of these lengths too: {names(bins)}.")
    return lines(*ways)
