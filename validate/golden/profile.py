"""Speculation profiles: what a draft accepts, in the file that lies beside its weights.

The keys are those of speculation_profile.json, schema 1.0 of pull request 2247 of
NVIDIA/Model-Optimizer, which is not merged; pull request 2315 writes fewer of them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, zip_longest
from operator import mul
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from typing_extensions import override

from ...quantize.files.checkpoint import PROFILE_FILE
from ...recipes.decode import AT_LEAST_0, AT_LEAST_1, Bounds, encode
from ...recipes.errors import GoldenError, short
from ...recipes.regular_file import read_text
from ...recipes.strict_json import decode, parse_object, reading
from ..counting.acceptance_counts import AcceptanceCounts, ContextBins, pooled
from ..counting.paired_change import pooled_mean
from ..measure.measurement import MOST_DRAFT_TOKENS
from .golden_acceptance import FORMAT, Golden, GoldenPrompt, golden_in

Rates = tuple[Annotated[float, Bounds(least=0, most=1)], ...]
DIGITS = 6  # as other producers round
_CHAINS = ("eagle", "draft_model")
"""Methods whose shorter drafts begin the longer ones, as pull request 2247 has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What some verify steps accepted; None = not known.

    Attributes:
        conditional_accept_rates: [K] of the steps that accepted all before, the share that did.
        marginal_accept_rates: [K] share of all steps that accepted the draft token at a position.
        mean_accept_length: draft tokens and the target's own, over verify steps.
        acceptance_length_histogram: verify steps by that length.
        num_samples: prompts.
        interval_95: of the mean; clusters of prompts are the samples.
    """

    conditional_accept_rates: Rates | None = None
    marginal_accept_rates: Rates | None = None
    mean_accept_length: Annotated[float | None, AT_LEAST_1] = None
    acceptance_length_histogram: Mapping[int, Annotated[float, AT_LEAST_0]] | None = None
    num_samples: int | None = None
    interval_95: tuple[float, ...] | None = None

    @property
    def rates(self) -> tuple[float, ...]:
        """Marginal rates; empty where neither vector is known."""
        conditional = self.conditional_accept_rates or ()
        return self.marginal_accept_rates or tuple(accumulate(conditional, mul))

    @property
    def mean(self) -> float:
        """The mean acceptance length over verify steps."""
        return self.mean_accept_length or 1 + sum(self.rates)

    def problem(self) -> str:
        """Which figures contradict each other; empty if none do."""
        rates = self.rates
        if not rates:
            return "" if self.mean_accept_length else "mean_accept_length: missing, and all rates"
        for source, other in self._marginal():
            pairs = zip_longest(rates, other, fillvalue=0.0)
            if other and any(_differ(rate, share) for rate, share in pairs):
                expected = short([round(share, 4) for share in other])
                return f"marginal_accept_rates: by {source} {expected}, got {short(rates)}"
        if _differ(self.mean, 1 + sum(rates)):
            expected = f"1 + the sum of the marginal rates, {1 + sum(rates):.4f}"
            return f"mean_accept_length: {self.mean} is not {expected} (over requests?)"
        return ""

    def _marginal(self) -> Iterator[tuple[str, Sequence[float]]]:
        """What else gives marginal rates, and which."""
        yield "their order", list(accumulate(self.rates, min))
        yield "conditional_accept_rates", list(accumulate(self.conditional_accept_rates or (), mul))
        steps = self.acceptance_length_histogram or {}
        past = range(2, len(self.rates) + 3)  # the last one is beyond K
        reached = (sum(n for length, n in steps.items() if length >= least) for least in past)
        if total := sum(steps.values()):
            yield "acceptance_length_histogram", [n / total for n in reached]


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > 0.002  # three digits in a file do


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(Accepted):
    """A speculation profile.

    Attributes:
        method: how the draft drafts, such as eagle3 or dflash.
        num_speculative_tokens: K that was measured.
        max_supported_k: the largest K that works.
        verification_method: longest_prefix, or block, which has no rates by position.
        accept_length_model: chain_analytic: the rates hold for a smaller K too; measured_per_k.
        per_category: by category of prompts, and by tokens before the verify step.
    """

    schema_version: Literal["1.0"] = "1.0"
    measured: Literal[True] = True
    method: str | None = None
    draft_checkpoint: object = None
    target_model: object = None
    num_speculative_tokens: Annotated[int | None, Bounds(least=1, most=MOST_DRAFT_TOKENS)] = None
    block_size: int | None = None
    max_supported_k: int | None = None
    verification_method: Literal["longest_prefix", "block"] | None = None
    accept_length_model: str | None = None
    accept_length_by_k: Mapping[int, float] | None = None
    per_category: Mapping[str, Accepted] | None = None
    measurement_conditions: Mapping[str, object] | None = None

    @property
    def num_draft_tokens(self) -> int:
        """K."""
        return self.num_speculative_tokens or len(self.rates)

    @override
    def problem(self) -> str:
        """Which figures contradict each other, K or the method; empty if none do."""
        expected = 0 if self.verification_method == "block" else self.num_draft_tokens
        for name, part in {"": self, **(self.per_category or {})}.items():
            if len(part.rates) not in (0, expected):
                where = f"per_category.{name}: " if name else ""
                return f"{where}expected {expected} accept_rates, got {len(part.rates)}"
        if not self.num_draft_tokens:
            return "num_speculative_tokens: missing"
        return Accepted.problem(self)


def profile_of(golden: Golden) -> Profile:
    """The figures that follow from counts."""
    prompts, draft_tokens = golden.prompts, golden.num_draft_tokens
    whole, is_chain = _figures(prompts), (golden.method or "").startswith(_CHAINS)
    return Profile(
        **whole,
        method=golden.method,
        draft_checkpoint={"id": golden.draft, "tensors_sha256": golden.draft_sha256},
        target_model={"id": golden.target},
        num_speculative_tokens=draft_tokens,
        max_supported_k=draft_tokens,
        verification_method="longest_prefix",
        accept_length_model="chain_analytic" if is_chain else "measured_per_k",
        accept_length_by_k={draft_tokens: whole["mean_accept_length"]},
        per_category={name: Accepted(**_figures(some)) for name, some in _parts(golden) if some},
        measurement_conditions={
            "producer": f"draftquant {golden.draftquant}",
            "engine": golden.source,
            "engine_version": golden.source_version,
            "temperature": golden.temperature,
            "prompts_sha256": golden.prompts_sha256,
            "estimand": golden.estimand,
        },
    )


def _parts(golden: Golden) -> Iterator[tuple[str, list[GoldenPrompt]]]:
    for name in filter(None, dict.fromkeys(prompt.category for prompt in golden.prompts)):
        yield name, [prompt for prompt in golden.prompts if prompt.category == name]
    for i, label in enumerate(ContextBins(edges=golden.context_edges).labels):
        yield (
            f"context {label}",
            [
                replace(prompt, histogram=prompt.context_bins[i])
                for prompt in golden.prompts
                if i < len(prompt.context_bins) and any(prompt.context_bins[i])
            ],
        )


def _figures(prompts: Sequence[GoldenPrompt]) -> dict[str, Any]:
    requests = [prompt.counts for prompt in prompts]
    counts = pooled(requests, requests[0].num_draft_tokens)
    return {
        "conditional_accept_rates": _rounded(rate or 0.0 for rate in counts.conditional),
        "marginal_accept_rates": _rounded(counts.survival),
        "mean_accept_length": round(counts.mean_acceptance_length, DIGITS),
        "acceptance_length_histogram": dict(enumerate(counts.histogram, 1)),
        "num_samples": len(prompts),
        "interval_95": _interval(prompts),
    }


def _rounded(rates: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(rate, DIGITS) for rate in rates)


def _interval(prompts: Sequence[GoldenPrompt]) -> tuple[float, ...] | None:
    clusters: dict[int, AcceptanceCounts] = {}
    for prompt in prompts:
        known = clusters.get(prompt.cluster)
        clusters[prompt.cluster] = prompt.counts if known is None else known + prompt.counts
    emitted = [counts.num_emitted_tokens for counts in clusters.values()]
    steps = [counts.num_steps for counts in clusters.values()]
    mean = pooled_mean(emitted, steps, confidence=0.975)
    bounds = (round(mean.lower, DIGITS), round(mean.upper, DIGITS))
    return bounds if mean.has_spread else None


def profile_document(profile: Profile) -> str:
    """The text of a file."""
    return f"{json.dumps(encode(profile), indent=2, allow_nan=False)}\n"


_FIX = (
    f"give a {PROFILE_FILE} of schema 1.0, or what --golden of 'replay', 'gate', 'report' or"
    " 'measure' wrote"
)


def read_profile(path: Path) -> Profile:
    """Golden acceptance or a profile, or the profile in a draft's folder."""
    place = path / PROFILE_FILE if path.is_dir() else path
    with reading(place, GoldenError, _FIX, "is no golden acceptance and no profile: "):
        document = parse_object(read_text(place))
        if document.get("format") == FORMAT:
            return profile_of(golden_in(document))
        if document.get("measured") is not False:
            known = _known(Profile, document)
            if isinstance(parts := known.get("per_category"), dict):
                each = {name: _known(Accepted, part) for name, part in parts.items()}
                known["per_category"] = each
            return cast(Profile, decode(Profile, known))
    raise GoldenError(
        place,
        "nobody measured this draft (measured: false)",
        fix="draftquant replay DRAFT --traces T --golden G.json; golden G.json --for profile",
    )


def _known(cls: type[Accepted], document: Any) -> Any:
    """A document without the keys of other producers."""
    if not isinstance(document, dict):
        return document
    names = {field.name for field in fields(cls)}
    return {key: value for key, value in document.items() if key in names}
