"""How near a tie was the target's choice where a served text parts from a recorded one?

Three may know: the recorded log-probabilities, those that the server told, and the target's own
head on the recorded features, where both are at hand.
"""

from torch import Tensor

from ...calibration.traces.head_agreement import normalized
from ...calibration.traces.prompt_trace import PromptTrace
from ...calibration.traces.target_tables import FINAL_NORM, HEAD, SharedTables
from ...calibration.traces.trace_folder import TraceFolder
from ...quantize.drafts.maths import linear
from ..measure.measurement import RequestRecord


def choice_gap(
    record: RequestRecord,
    trace: PromptTrace,
    position: int,
    traces: TraceFolder,
    tables: SharedTables,
) -> float | None:
    """Nats between the recorded token and the served one, under the target that was recorded.

    Args:
        record: what was served.
        trace: of the same prompt.
        position: of the output, 0-based, at which both have a token, and another one.
        traces: that hold the trace.
        tables: the target's head and last norm, or none.

    Returns:
        At least 0; a lower bound where the served token is none of the recorded most likely ones.
        None where nobody knows.
    """
    served = record.token_ids[position]
    if trace.top_logprobs is not None and trace.top_token_ids is not None:
        ids = trace.top_token_ids[position].tolist()
        logprobs = trace.top_logprobs[position].tolist()
        other = ids.index(served) if served in ids else len(ids) - 1
        if len(ids) > 1:
            return float(max(logprobs) - logprobs[other])
    if record.top_gap is not None:
        return record.top_gap[position]
    return _by_head(trace, position, served, traces, tables)


def _by_head(
    trace: PromptTrace, position: int, served: int, traces: TraceFolder, tables: SharedTables
) -> float | None:
    """By the target's head on the output of its last layer, where that is recorded."""
    features, num_layers = traces.manifest.features, traces.manifest.target.num_layers
    if features.kind != "aux" or features.aux_layer_ids[-1] != num_layers - 1:
        return None
    if HEAD not in tables or FINAL_NORM not in tables:
        return None
    row = trace.prompt_length - 1 + position
    width = features.width // len(features.aux_layer_ids)
    hidden = normalized(trace.features[row : row + 1, -width:].float())
    head, norm = tables[HEAD], tables[FINAL_NORM].float()
    hidden = hidden.to(head.device)
    gaps = [_gap(linear(hidden * weight, head)[0], served) for weight in (norm, 1 + norm)]
    recorded = int(trace.token_ids[row + 1])
    own = [_gap(linear(hidden * weight, head)[0], recorded) for weight in (norm, 1 + norm)]
    return gaps[own.index(min(own))]  # the norm under which the recorded token is the likelier


def _gap(logits: Tensor, token: int) -> float:
    return float(logits.max() - logits[token])
