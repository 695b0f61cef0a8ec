"""Release policies as data: how much acceptance a draft may lose, how sure we must be, how often.

At look i of n at a growing set of prompts the z value has to clear c_i, so that under the limit
itself, where each look's z is standard normal and corr(z_i, z_j) = sqrt(i / j), the chance that any
of n looks clears is still 1 - confidence:

    pocock           c_i = C                 the same bound at every look
    obrien-fleming   c_i = C * sqrt(n / i)   hard at first, at the last look hardly wider than one

C is computed, by the recursion of Armitage, McPherson and Rowe (1969) over the density of the sums
that have not crossed yet. Source of the two shapes: Jennison & Turnbull, Group Sequential Methods
(2000), chapter 2, whose two-sided tables at 0.10 are these at a confidence of 0.95.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from ...recipes.decode import AT_LEAST_2, CONFIDENCE, SHARE
from ...recipes.errors import GateError
from ...recipes.schema import PolicyName

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Limits of the gate; those of policy `name`, or "custom" if any was changed.

    Attributes:
        max_category_drop: wider than the whole's, so that judging many causes no false FAIL.
        every_category_passes: a PASS needs PASS in every category; else no FAIL in any.
        min_prompts: the effective sample size; 30 takes 35 prompts of similar lengths, and up to 60
            of different lengths.
        min_step_acceptance: a; a baseline whose mean acceptance length is below 1 + a + ... + a^K
            is doubted. Published EAGLE-3 drafts lie above 2.3 for K = 3, this floor at 2.02; a
            wrong target of the same family gave 1.87, and a weak draft with right inputs 1.77.
        max_ceiling_share: share of K + 1 above which an acceptance length is an anomaly.
    """

    name: Literal["release", "screening", "custom"]
    max_relative_drop: float
    max_category_drop: float = 0.03
    min_category_prompts: int = 30
    every_category_passes: bool = False
    confidence: float = 0.95
    power: float = 0.8
    min_prompts: int
    max_relative_gain: float = 0.05
    min_step_acceptance: float = 0.55
    min_acceptance_length: float = 1.05
    max_ceiling_share: float = 0.97
    record_required: bool = False

    def problem(self) -> str:
        """What is wrong with the limits; empty if nothing."""
        shares = (self.max_relative_drop, self.max_category_drop, self.power)
        if not all(0 < share < 1 for share in shares) or not 0.5 < self.confidence < 1:
            return "max_relative_drop, max_category_drop, power, confidence: expected shares"
        if min(self.min_prompts, self.min_category_prompts) < 2:
            return "min_prompts, min_category_prompts: expected at least 2"
        named = dataclasses.asdict(self if self.name == "custom" else POLICIES[self.name])
        for key, value in dataclasses.asdict(self).items():
            if value != named[key]:
                return f"{key}: the policy {self.name!r} has {named[key]}, got {value}"
        return ""


POLICIES: Mapping[PolicyName, Policy] = MappingProxyType(
    {
        "release": Policy(
            name="release", max_relative_drop=0.01, min_prompts=30, record_required=True
        ),
        "screening": Policy(name="screening", max_relative_drop=0.03, min_prompts=10),
    }
)

_LOOSER_IF_LARGER = ("max_relative_drop", "max_category_drop", "min_category_prompts",
                     "max_relative_gain", "max_ceiling_share")  # fmt: skip
_LOOSER_IF_SMALLER = ("confidence", "min_prompts", "min_step_acceptance", "min_acceptance_length",
                      "record_required")  # fmt: skip


def resolve_policy(
    name: PolicyName,
    *,
    max_relative_drop: float | None = None,
    confidence: float | None = None,
    min_prompts: int | None = None,
    every_category_passes: bool = False,
    unrecorded: bool = False,
) -> Policy:
    """The named policy with overrides from the command line, which make it "custom".

    A category may always lose as much as the whole. GateError: an override is out of range.
    """
    if name not in POLICIES:
        raise GateError("policy", f"no policy {name!r}", fix=f"use one of: {', '.join(POLICIES)}")
    SHARE.check(GateError, "max_relative_drop", max_relative_drop, fix="write 1 % as 0.01")
    CONFIDENCE.check(GateError, "confidence", confidence, fix="write 95 % as 0.95")
    AT_LEAST_2.check(GateError, "min_prompts", min_prompts, fix="one prompt has no spread")
    named = POLICIES[name]
    drop = named.max_relative_drop if max_relative_drop is None else max_relative_drop
    chosen = dataclasses.replace(
        named,
        max_relative_drop=drop,
        max_category_drop=max(drop, named.max_category_drop),
        every_category_passes=every_category_passes,
        confidence=named.confidence if confidence is None else confidence,
        min_prompts=named.min_prompts if min_prompts is None else min_prompts,
        record_required=named.record_required and not unrecorded,
    )
    return chosen if chosen == named else dataclasses.replace(chosen, name="custom")


def looser_than_release(policy: Policy) -> tuple[str, ...]:
    """What it allows and `release` does not, such as "max_relative_drop 0.03 (release: 0.01)"."""
    ours, release = dataclasses.asdict(policy), dataclasses.asdict(POLICIES["release"])
    larger = [key for key in _LOOSER_IF_LARGER if ours[key] > release[key]]
    smaller = [key for key in _LOOSER_IF_SMALLER if ours[key] < release[key]]
    return tuple(f"{key} {ours[key]} (release: {release[key]})" for key in (*larger, *smaller))


Spending = Literal["obrien-fleming", "pocock"]

MAX_LOOKS = 10
_NUM_NODES = 128  # nodes of Gauss-Legendre: C is right to 1e-6 up to MAX_LOOKS
_FAR = 9.0  # standard deviations: what lies beyond is below 1e-18


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Planned interim analysis `number` of `total`, each after adding equally many prompts."""

    number: int
    total: int
    spending: Spending

    def problem(self) -> str:
        """What is wrong with its numbers; empty if nothing."""
        if not 1 <= self.number <= self.total <= MAX_LOOKS:
            return f"expected 1 <= number <= total <= {MAX_LOOKS}"
        return ""

    def adjusted_confidence(self, confidence: float) -> float:
        """The confidence of this look's bounds at which all looks together keep `confidence`."""
        from scipy import stats

        boundary = boundaries(self.total, self.spending, confidence)[self.number - 1]
        return min(float(stats.norm.cdf(boundary)), math.nextafter(1.0, 0.0))


def parse_look(text: str | None, spending: Spending | None) -> Look | None:
    """`--look` ("i/n") and `--spending` (None = O'Brien-Fleming); GateError: no such look."""
    if text is None and spending is not None:
        raise GateError("--spending", "needs --look, got none", fix="add --look i/n")
    if text is None:
        return None
    number, _, total = text.partition("/")
    plain = all(part.isascii() and part.isdigit() and len(part) < 4 for part in (number, total))
    if not plain or not 1 <= int(number) <= int(total) <= MAX_LOOKS:
        what = f"expected i/n with 1 <= i <= n <= {MAX_LOOKS}, got {text!r}"
        fix = "write the second of three planned interim analyses as 2/3"
        raise GateError("--look", what, fix=fix)
    return Look(number=int(number), total=int(total), spending=spending or "obrien-fleming")


@functools.cache
def boundaries(total: int, spending: Spending, confidence: float) -> tuple[float, ...]:
    """c_1 ... c_total, one-sided, in standard deviations."""
    import numpy as np  # as scipy: both take a second to import, and the gate's help needs neither
    from scipy import optimize, stats

    shape = np.ones(total)
    if spending == "obrien-fleming":
        shape = np.sqrt(total / np.arange(1, total + 1))
    alpha = 1 - confidence
    least, most = stats.norm.isf(alpha), stats.norm.isf(alpha / total)  # one look; Bonferroni
    if total > 1:
        least = optimize.brentq(
            lambda c: crossing_probability(c * shape) - alpha, least, most, xtol=1e-9
        )
    return tuple(float(c) for c in least * shape)


def crossing_probability(boundary: "Sequence[float] | np.ndarray") -> float:
    """Chance that a standard normal walk, seen at equally spaced looks, is ever above `boundary`.

    `boundary` is of z at looks 1 .. n; the sum of k standard normal steps is z * sqrt(k).
    """
    import numpy as np

    nodes, weights = np.polynomial.legendre.leggauss(_NUM_NODES)
    before, mass = np.zeros(1), np.ones(1)  # the walk's places so far, and their probabilities
    for look, limit in enumerate(boundary, start=1):
        low, high = -_FAR * math.sqrt(look), min(limit, _FAR) * math.sqrt(look)
        places = low + (high - low) * (nodes + 1) / 2
        density = np.exp(-0.5 * (places[:, None] - before) ** 2) @ mass / math.sqrt(2 * math.pi)
        before, mass = places, density * weights * (high - low) / 2
    return 1 - float(mass.sum())


Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "ANOMALOUS"]
EXIT_CODES: dict[Verdict, int] = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3, "ANOMALOUS": 3}
_WORST_FIRST: tuple[Verdict, ...] = ("ANOMALOUS", "FAIL", "INCONCLUSIVE", "PASS")


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """ANOMALOUS before FAIL before INCONCLUSIVE before PASS; at least one is given."""
    return min(verdicts, key=_WORST_FIRST.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneDraft:
    """Where one draft was counted twice, and what was judged by it.

    `first` and `second` are the two places ("on the second server"), `cause` is what costs
    acceptance there. `loses` and `breaks` are what to do if the draft loses there, or accepts
    nothing; `gains` if it accepts far more, "" = that is no anomaly.
    """

    first: str
    second: str
    cause: str
    loses: str
    breaks: str
    gains: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """What a verdict calls the way in which drafts were counted.

    `take` is what to do with fresh prompts, and `count` the command for it; `join` puts them
    beside those that were judged, for `gate_joined`; `longer` is how a prompt gets more verify
    steps.
    """

    both_again: str
    take: str
    count: str
    gate: str
    join: str
    gate_joined: str
    longer: str
    one_draft: OneDraft | None = None

    @property
    def there(self) -> str:
        """Where the second count was made, after a noun; "" for two drafts in one place."""
        return "" if self.one_draft is None else f" {self.one_draft.second}"


REPLAYED = Wording(
    both_again="Replay both drafts in one run, with one K.",
    take="Record",
    count="draftquant record --target TARGET --draft BF16 --tables --prompts PROMPTS --out FRESH",
    gate="draftquant gate BF16 QUANT --traces FRESH",
    join="Join both sets of traces: draftquant traces merge TRACES FRESH --out ALL",
    gate_joined="draftquant gate BF16 QUANT --traces ALL",
    longer="record longer continuations (record --max-new-tokens), or judge a smaller K",
)


def in_percent(confidence: float) -> str:
    """95%, 98.47%, 99.9999%: with enough digits to tell it from certainty."""
    digits = 2 + math.ceil(-math.log10(1 - confidence))
    return f"{100 * confidence:.{digits}g}%"
