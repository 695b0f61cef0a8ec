"""Release policies as data: how much acceptance a draft may lose, and how sure we must be."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..recipes.schema import PolicyName
from .errors import GateError


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Limits of the gate.

    Attributes:
        max_relative_drop: the margin: mean acceptance length may fall by less than this share.
        confidence: of the one-sided bound that has to clear the margin.
        power: with which `required_num_prompts` is computed.
        min_prompts: with fewer prompts there is no PASS and no FAIL.
        max_relative_gain: a larger gain is no quantization effect.
        min_step_acceptance: a; a baseline whose mean acceptance length is below 1 + a + ... + a^K
            does not read what it was trained on. Published EAGLE-3 drafts lie above 2.3 for K = 3,
            this floor at 2.02; a wrong target of the same family gave 1.87.
        min_acceptance_length: a draft below accepts next to nothing: a broken load.
        max_ceiling_share: share of K + 1 above which an acceptance length is not believed.
    """

    name: PolicyName
    max_relative_drop: float
    confidence: float = 0.95
    power: float = 0.8
    min_prompts: int
    max_relative_gain: float = 0.05
    min_step_acceptance: float = 0.55
    min_acceptance_length: float = 1.05
    max_ceiling_share: float = 0.97


POLICIES: Mapping[PolicyName, Policy] = MappingProxyType(
    {
        "release": Policy(name="release", max_relative_drop=0.01, min_prompts=30),
        "screening": Policy(name="screening", max_relative_drop=0.03, min_prompts=10),
    }
)


def resolve_policy(
    name: PolicyName,
    *,
    max_relative_drop: float | None = None,
    confidence: float | None = None,
    min_prompts: int | None = None,
) -> Policy:
    """The named policy with overrides from the command line.

    Args:
        name: "release" or "screening".
        max_relative_drop: in (0, 1).
        confidence: in (0.5, 1).
        min_prompts: at least 2.

    Raises:
        GateError: no such policy, or an override is out of range.
    """
    if name not in POLICIES:
        raise GateError("policy", f"no policy {name!r}", fix=f"use one of: {', '.join(POLICIES)}")
    if max_relative_drop is not None and not 0 < max_relative_drop < 1:
        raise GateError("max_relative_drop", f"expected a share in (0, 1), got {max_relative_drop}",
                        fix="write 1 % as 0.01")  # fmt: skip
    if confidence is not None and not 0.5 < confidence < 1:
        raise GateError("confidence", f"expected a share in (0.5, 1), got {confidence}",
                        fix="write 95 % as 0.95")  # fmt: skip
    if min_prompts is not None and min_prompts < 2:
        raise GateError("min_prompts", f"expected at least 2, got {min_prompts}",
                        fix="one prompt has no spread")  # fmt: skip
    overrides = {
        "max_relative_drop": max_relative_drop,
        "confidence": confidence,
        "min_prompts": min_prompts,
    }
    given = {key: value for key, value in overrides.items() if value is not None}
    return dataclasses.replace(POLICIES[name], **given)  # type: ignore[arg-type]
