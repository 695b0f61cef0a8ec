"""What `replay` and `gate` ask the confidence heads of drafts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import AnyPath

if TYPE_CHECKING:
    from ...calibration.traces.trace_folder import TraceFolder
    from ...quantize.stored.loading import LoadedDraft
    from ...validate.confidence.head_calibration import CalibrationChange
    from ...validate.confidence.temperatures import Temperatures
    from ...validate.counting.confidence_answers import ConfidenceQuestion
    from ...validate.counting.draft_replay import DraftReplay
    from ...validate.counting.estimand import DraftSampling


def confidence_question(
    drafts: "Sequence[LoadedDraft]",
    num_draft_tokens: int | None,
    rule: str | None,
    sts: AnyPath | None,
) -> "ConfidenceQuestion | None":
    """What `replay --confidence RULE --sts FILE` asks of every draft; None = nothing."""
    from ...validate.confidence.length_rules import length_rule
    from ...validate.counting.confidence_answers import ConfidenceQuestion

    if rule is None and sts is None:
        return None
    found = _temperatures_of(drafts, num_draft_tokens, sts)
    own = None if found is None else found.temperatures
    return ConfidenceQuestion(
        rule=None if rule is None else length_rule(rule),
        temperatures=(own,) * len(drafts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsOfGate:
    """What the gate asks of drafts with a confidence head, whether or not it is told.

    Attributes:
        asked: None = nothing. warnings: why not, and what is not known of the temperatures.
    """

    asked: "ConfidenceQuestion | None"
    warnings: tuple[str, ...]

    def change(
        self, replays: "Sequence[DraftReplay]", confidence: float
    ) -> "CalibrationChange | None":
        """Of the candidate against the baseline, with bounds at a confidence."""
        from ...validate.counting.calibration_change import calibration_change

        if self.asked is None:
            return None
        baseline, candidate, *_ = (one.prompts for one in replays)
        return calibration_change(
            baseline, candidate, confidence, temperatures=self.asked.temperatures[1]
        )


def heads_of_gate(
    drafts: "Sequence[LoadedDraft]",
    traces: "TraceFolder",
    *,
    draft_sampling: "DraftSampling",
    num_draft_tokens: int | None,
    sts: AnyPath | None,
) -> HeadsOfGate:
    """What the gate asks; the temperatures of `--sts` are the candidate's.

    Raises:
        DraftQuantError: temperatures for drafts that cannot be asked, no file of temperatures, or
            one that was fitted on the gate's prompts.
    """
    from ...calibration.passes.predictions import confident
    from ...validate.counting.confidence_answers import ConfidenceQuestion, check_confident
    from ...validate.judging.held_out import check_temperatures_held_out

    without = [draft.name for draft in drafts if confident(draft.forward) is None]
    if sts is not None:
        check_confident(drafts, draft_sampling)
    elif len(without) == len(drafts):
        return HeadsOfGate(asked=None, warnings=())
    elif without or draft_sampling != "greedy":
        why = f"there is none in {', '.join(without)}" if without else "proposals were drawn"
        told = f"the calibration error of the confidence head was not measured: {why}"
        return HeadsOfGate(asked=None, warnings=(told,))
    found = _temperatures_of(drafts, num_draft_tokens, sts)
    return HeadsOfGate(
        asked=ConfidenceQuestion(temperatures=(None, None if not found else found.temperatures)),
        warnings=check_temperatures_held_out(found, traces),
    )


def _temperatures_of(
    drafts: "Sequence[LoadedDraft]", num_draft_tokens: int | None, sts: AnyPath | None
) -> "Temperatures | None":
    """What stands in an STS file, for the K of the replay; None = there is no file."""
    from ...validate.confidence.temperatures import read_temperatures
    from ...validate.counting.trace_replay import chosen_num_draft_tokens

    if sts is None:
        return None
    chosen = chosen_num_draft_tokens(num_draft_tokens, drafts)
    return read_temperatures(Path(sts), chosen)
