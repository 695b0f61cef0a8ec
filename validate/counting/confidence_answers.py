"""What the confidence heads of replayed drafts are asked, and their answers along a prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...calibration.passes.batches import batches_of, proposals_of_batch, work_of
from ...calibration.passes.draft_inputs import check_trace_fits
from ...calibration.passes.predictions import Proposals, confident, num_draft_tokens_fault
from ...calibration.traces.prompt_trace import PromptTrace
from ...calibration.traces.trace_folder import TraceFolder
from ...quantize.drafts.kinds.block import ConfidentBlockForward
from ...quantize.stored.loading import LoadedDraft
from ..confidence.calibration_error import SurvivalCounts
from ..confidence.shortened import LengthRule, ShortenedCounts, shortened_rounds
from ..confidence.survival import confidences, survivals
from ..errors import ReplayError
from .estimand import DraftSampling
from .rounds import accepted_by_row, rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidenceQuestion:
    """What is asked of confidence heads.

    Attributes:
        rule: by which verify steps are shortened; None = all K drafted tokens are verified.
        temperatures: of each draft, in the order of the replay, see `confidences`; drafts beyond
            them have none.
    """

    rule: LengthRule | None = None
    temperatures: tuple[tuple[float, ...] | None, ...] = ()

    def answers(
        self, trace: PromptTrace, proposed: Proposals, draft: int
    ) -> tuple[SurvivalCounts, ShortenedCounts | None]:
        """Of the rounds of decoding one prompt, with all K tokens and shortened.

        Args:
            trace: the prompt.
            proposed: of a draft, with its confidence.
            draft: which one of the replay.
        """
        assert proposed.confidence_logits is not None  # every draft that is asked has a head
        own = self.temperatures[draft] if draft < len(self.temperatures) else None
        accepted = accepted_by_row(trace, proposed.token_ids)
        rows = _rows_of_rounds(accepted)
        logits = proposed.confidence_logits
        survival = SurvivalCounts.of(survivals(logits[rows], own), torch.tensor(accepted)[rows])
        if self.rule is None:
            return survival, None
        shortened = shortened_rounds(accepted, confidences(logits, own), self.rule)
        return survival, ShortenedCounts.of(shortened)


def check_confident(drafts: Sequence[LoadedDraft], draft_sampling: DraftSampling) -> None:
    """Refuse drafts that cannot say how likely their tokens are accepted.

    Raises:
        ReplayError: a draft has no confidence head, or draws its tokens.
    """
    for draft in drafts:
        if confident(draft.forward) is None:
            raise ReplayError(draft.name, _why_not(draft), fix=_WITHOUT)
    if draft_sampling != "greedy":
        raise ReplayError(
            "--draft-sampling",
            "drawn proposals have no confidence of their own along recorded text: the head reads"
            " the drawn tokens, which nothing recorded",
            fix="leave --draft-sampling out: engines propose greedily by default",
        )


_WITHOUT = "leave --confidence and --sts out: the draft is served with a fixed number of tokens"


def _why_not(draft: LoadedDraft) -> str:
    engines = (
        "vLLM 0.33 guesses acceptance by a regression that it fits again and again on whatever it"
        " serves (v1/worker/gpu/spec_decode/acceptance_estimator.py), so that what one text gets"
        " depends on all others; SGLang 0.5.23 shortens no verify step without a head"
    )
    if isinstance(draft.forward, ConfidentBlockForward):
        return f"the draft stores no confidence head (confidence_head.proj.weight). {engines}"
    return f"drafts of family {draft.family.name} have no confidence head. {engines}"


def confidence_samples(
    draft: LoadedDraft,
    traces: TraceFolder,
    *,
    num_draft_tokens: int,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[Tensor, Tensor]:
    """What SGLang collects to fit temperatures: of every verify step, all K tokens verified.

    Args:
        draft: with a confidence head.
        traces: greedy or sampled ones.
        num_draft_tokens: K.
        on_progress: called with (work done, work) after each batch.

    Returns:
        The logits of the head [N, K] float32, and the accepted draft tokens [N] int64.

    Raises:
        ReplayError: the draft has no confidence head, it cannot draft so many tokens, or no
            continuation is long enough.
        TraceError: the traces do not fit the draft, or are damaged.
    """
    check_confident([draft], "greedy")
    if fault := num_draft_tokens_fault(draft.geometry, num_draft_tokens):
        raise ReplayError(f"{draft.name}: num_draft_tokens", fault[0], fix=fault[1])
    check_trace_fits(draft, traces)
    prompts = traces.manifest.prompts
    batches = batches_of(prompts, max_prompts=None if draft.rounds_alone else 1)
    work = [work_of([prompts[i] for i in batch], num_draft_tokens) for batch in batches]
    logits, accepted, done = [], [], 0
    for batch, own_work in zip(batches, work, strict=True):
        loaded = [traces.load(prompts[i]) for i in batch]
        found = proposals_of_batch(
            draft, traces, loaded, num_draft_tokens=num_draft_tokens, confident=True
        )
        for trace, proposed in zip(loaded, found, strict=True):
            assert proposed.confidence_logits is not None  # it was asked
            own = accepted_by_row(trace, proposed.token_ids)
            rows = _rows_of_rounds(own)
            logits.append(proposed.confidence_logits[rows])
            accepted.append(torch.tensor(own, dtype=torch.int64)[rows])
        done += own_work
        on_progress(done, sum(work))
    if not sum(map(len, logits)):
        raise ReplayError(
            traces.folder,
            f"no continuation is longer than num_draft_tokens = {num_draft_tokens}",
            fix="record longer continuations",
        )
    return torch.cat(logits), torch.cat(accepted)


def _rows_of_rounds(accepted: Sequence[int]) -> list[int]:
    """Where the rounds of decoding begin."""
    rows, row = [], 0
    for kept in rounds(accepted):
        rows.append(row)
        row += kept + 1
    return rows
