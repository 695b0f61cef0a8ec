"""What a report says of two drafts, of a draft that was taught, or of several judgements: its keys.

docs/report-format.md describes every one. Contradictions that need no arithmetic are refused here,
whatever does not follow from the counts by `judged_again`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ...calibration.traces.feature_evidence import FeatureEvidence
from ...calibration.traces.manifest import Sampling, TargetIdentity
from ..counting.draft_replay import FirstStepAgreement
from ..counting.estimand import DraftSampling
from ..counting.paired_change import PairedChange, RequiredPrompts
from ..judging.anomalies import Background
from ..judging.categories import CategoryFigures
from ..judging.decision import Verdict
from ..judging.interim_analysis import Look
from ..judging.judgement import DraftFigures, PromptFigures
from ..judging.policy import Policy
from ..judging.served_figures import ServedFigures
from ..parity.finding import Finding
from ..served.server_noise import ServerNoise
from .contradictions import comparison_problem, exit_code_problem

_SHIFT = re.compile(r"0|-?[1-9][0-9]?")


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureFigures:
    """As in `FeatureEvidence`; JSON has the shifts as text."""

    repeats: int
    constant: bool
    share: Mapping[str, float]

    @property
    def evidence(self) -> FeatureEvidence:
        """As it was computed."""
        share = {int(shift): share for shift, share in self.share.items()}
        return FeatureEvidence(repeats=self.repeats, constant=self.constant, share=share)

    def problem(self) -> str:
        """What no traces say; empty for what they may say."""
        if not all(_SHIFT.fullmatch(shift) for shift in self.share):
            return "share: expected whole numbers as shifts"
        if self.evidence.checked and not self.constant and "0" not in self.share:
            return "share: expected that of the token's own position, 0"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedText:
    """The traces that were replayed; as in `TraceFigures`."""

    sha256: str
    target: TargetIdentity
    temperature: float
    sampling: Sampling | None
    mean_token_probability: float | None
    repeated_8gram_share: float
    num_near_duplicates: int
    features: FeatureFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two drafts; keys as in `GateReport`, and `exit_code` and `relative_change`."""

    kind: Literal["comparison"]
    verdict: Verdict
    reason: str
    action: str | None
    warnings: tuple[str, ...]
    policy: Policy
    looser_than_release: tuple[str, ...]
    look: Look | None
    estimand: str
    convention: str
    num_draft_tokens: int
    draft_sampling: DraftSampling | None
    traces: RecordedText | None
    background: Background
    num_prompts: int
    num_copies: int
    num_short_prompts: int
    baseline: DraftFigures
    candidate: DraftFigures
    change: PairedChange | None
    required_num_prompts: RequiredPrompts | None
    first_step: FirstStepAgreement | None
    categories: tuple[CategoryFigures, ...]
    served: ServedFigures | None
    prompts: tuple[PromptFigures, ...]
    num_clusters: int | None = None
    exit_code: int
    relative_change: float | None

    def problem(self) -> str:
        """What no gate says; empty for what one may say."""
        return exit_code_problem(self.verdict, self.exit_code) or comparison_problem(
            num_draft_tokens=self.num_draft_tokens,
            drafts=(self.baseline, self.candidate),
            changes=(self.change, *(each.change for each in self.categories)),
            limits=(
                self.policy.max_relative_drop,
                *(each.max_relative_drop for each in self.categories),
            ),
            prompts=self.prompts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Retuned:
    """Both comparisons of a draft that its target taught; keys as in `RetunedReport`."""

    kind: Literal["retuned"]
    mark: str
    rule: str
    verdict: Verdict
    reason: str
    action: str | None
    exit_code: int
    quantization_change: float | None
    training_change: float | None
    quantization_and_training_change: float | None
    against_tuned: Comparison
    against_bf16: Comparison

    @property
    def warnings(self) -> tuple[str, ...]:
        """Of both, each once."""
        both = (*self.against_tuned.warnings, *self.against_bf16.warnings)
        return tuple(dict.fromkeys(both))

    def problem(self) -> str:
        """As of `Comparison`."""
        return exit_code_problem(self.verdict, self.exit_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """Several judgements of one candidate; keys as in `JointReport`."""

    kind: Literal["joint"]
    verdict: Verdict
    reason: str
    action: str | None
    exit_code: int
    warnings: tuple[str, ...]
    served: Comparison | None
    replayed: Comparison | Retuned | None
    noise: ServerNoise | None
    parity: tuple[Finding, ...]

    def problem(self) -> str:
        """As of `Comparison`."""
        if self.served is None and self.replayed is None:
            return "served, replayed: expected one of them"
        changes = () if self.noise is None else (self.noise.change, self.noise.drift)
        return exit_code_problem(self.verdict, self.exit_code) or comparison_problem(
            changes=changes
        )


Judgement = Comparison | Retuned | Joint
