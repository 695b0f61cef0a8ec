"""Release policies as data: how much acceptance a draft may lose, and how sure we must be."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ...recipes.bounds import AT_LEAST_2, CONFIDENCE, SHARE
from ...recipes.expectations import PolicyName
from ..errors import GateError


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Limits of the gate.

    Attributes:
        name: of `POLICIES`, whose limits it has then; "custom" if any was changed.
        max_relative_drop: the margin: mean acceptance length may fall by less than this share.
        max_category_drop: the margin of each category with at least `min_category_prompts` distinct
            prompts. It is wider than the whole's, so that what passes as a whole is far from it:
            judging many categories, without a correction, costs no false FAIL.
        every_category_passes: a PASS asks for one of each such category; else for no FAIL of any.
        confidence: of the one-sided bounds that have to clear the margins.
        power: with which `required_num_prompts` is computed.
        min_prompts: with a smaller effective sample size there is no PASS and no FAIL; 30 takes 35
            prompts of similar lengths, and up to 60 of different lengths.
        max_relative_gain: a larger gain is no quantization effect.
        min_step_acceptance: a; a baseline whose mean acceptance length is below 1 + a + ... + a^K
            does not get the inputs that it was trained on. Published EAGLE-3 drafts lie above 2.3
            for K = 3, this floor at 2.02; a wrong target of the same family gave 1.87.
        min_acceptance_length: a draft below accepts next to nothing: a broken load.
        max_ceiling_share: share of K + 1 above which an acceptance length is an anomaly.
        record_required: a candidate folder needs a record of how it was quantized, because nothing
            else shows which prompts calibrated it.
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
        if self.min_prompts < 2 or self.min_category_prompts < 2:
            return "min_prompts, min_category_prompts: expected at least 2"
        if self.name == "custom":
            return ""
        named = dataclasses.asdict(POLICIES[self.name])
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

    Args:
        max_relative_drop: in (0, 1). A category may always lose as much as the whole.
        confidence: in (0.5, 1).
        min_prompts: at least 2.
        every_category_passes: see `Policy`.

    Raises:
        GateError: no such policy, or an override is out of range.
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
    """What this policy allows and `release` does not, as "max_relative_drop 0.03 (release: 0.01)".

    Whoever reads PASS takes it for that of a release unless he is told.
    """
    ours, release = dataclasses.asdict(policy), dataclasses.asdict(POLICIES["release"])
    loose = [
        *(key for key in _LOOSER_IF_LARGER if ours[key] > release[key]),
        *(key for key in _LOOSER_IF_SMALLER if ours[key] < release[key]),
    ]
    return tuple(f"{key} {ours[key]} (release: {release[key]})" for key in loose)
