"""What replay says of a verify step at every position of a text, and how clear its choices are.

An engine computes in BF16 with other kernels than replay. Where two tokens of the draft are nearly
as likely, either may come out on top; where they are not, both must choose alike. How far apart is
near is measured: replay in BF16 moves these distances against replay in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from draftquant.calibration.passes.draft_inputs import first_hidden
from draftquant.calibration.traces.prompt_trace import PromptTrace
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.drafts.forward import DraftForward, whole_rows
from draftquant.quantize.stored.loading import LoadedDraft
from draftquant.validate.counting.trace_replay import accepted_by_row
from torch import Tensor

NEAR = 4.0
"""Distances below so many times what BF16 moves them (root mean square) are near ties."""


_OUT = -1e30
"""Stands for the logit of a token that a draft cannot propose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryPosition:
    """A round at each row of a continuation, in the order of the rows.

    Attributes:
        accepted: tokens of the round.
        distances: [R][K] between the recorded token's logit and the best other one's; below 0
            where the draft proposes another.
    """

    accepted: tuple[int, ...]
    distances: tuple[tuple[float, ...], ...]


@torch.inference_mode()
def every_position(
    draft: LoadedDraft, traces: TraceFolder, trace: PromptTrace, num_draft_tokens: int
) -> EveryPosition:
    """Of one prompt, by the draft in the dtype that it was loaded in.

    Args:
        draft: on any device.
        traces: that hold the prompt, and fit the draft.
        trace: of the prompt.
        num_draft_tokens: K, one that the draft can propose.

    Raises:
        ForwardError: the draft computes NaN or infinity.
    """
    rows = whole_rows(trace.num_tokens, num_draft_tokens, first_row=trace.prompt_length - 1)
    proposed = torch.empty((len(rows), num_draft_tokens), dtype=torch.int64)
    distances = torch.empty(proposed.shape)
    # Row r at depth j predicts token r + 2 + j.
    predicted = torch.arange(rows.start, rows.stop)[:, None] + 2 + torch.arange(num_draft_tokens)
    recorded = trace.token_ids[predicted]
    hidden = first_hidden(draft, traces, trace)[None]
    token_ids = trace.token_ids[None].to(draft.device)
    how = {"rows": rows, "num_draft_tokens": num_draft_tokens}
    for one in draft.forward.passes(hidden, token_ids, **how):
        at = slice(one.rows.start - rows.start, one.rows.stop - rows.start)
        depths = slice(one.depths.start, one.depths.stop)
        logits = _by_token(draft.forward, draft.forward.logits(one.hidden).float())[0]
        proposed[at, depths] = logits.argmax(-1)
        distances[at, depths] = _distances(logits, recorded[at, depths])
    accepted = tuple(accepted_by_row(trace, proposed))
    return EveryPosition(accepted=accepted, distances=tuple(map(tuple, distances.tolist())))


def noise(one: Sequence[EveryPosition], other: Sequence[EveryPosition]) -> float:
    """How far two ways of computing move the distances, root mean square over all positions.

    Whether a token is among those that a draft chooses from is no distance, and left out.
    """
    pairs = [(torch.tensor(a.distances), torch.tensor(b.distances))
             for a, b in zip(one, other, strict=True)]  # fmt: skip
    moved = [(a - b)[torch.minimum(a, b) > _OUT / 2] for a, b in pairs]
    return float(torch.cat([m.flatten() for m in moved]).square().mean().sqrt())


def _by_token(forward: DraftForward, logits: Tensor) -> Tensor:
    """[..., draft vocabulary] -> [..., target vocabulary], on the CPU; what it lacks comes last."""
    tokens = forward.to_target(torch.arange(logits.shape[-1], device=logits.device))
    whole = logits.new_full((*logits.shape[:-1], int(tokens.max()) + 1), _OUT)
    return whole.index_copy(-1, tokens, logits.clamp(min=_OUT)).cpu()


def _distances(logits: Tensor, recorded: Tensor) -> Tensor:
    own = logits.gather(-1, recorded[..., None])
    return own[..., 0] - logits.scatter(-1, recorded[..., None], _OUT).amax(-1)
