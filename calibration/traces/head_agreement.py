"""Whether the head of the target gives the recorded tokens again.

Possible where the last recorded layer is the target's last one and its head and last norm are
available: then argmax(head(norm(h))) is the recorded next token. A token whose logit is within
BF16's resolution below the largest counts too: targets that compute in BF16 break such ties.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...quantize.drafts.maths import linear
from .target_tables import FINAL_NORM, HEAD, SharedTables
from .trace_folder import TraceFolder

MIN_AGREEMENT = 0.98
MAX_ROWS = 256  # of a vocabulary of 163,840 and a width of 7,168: 0.6 TFLOP

_BF16_STEP = 2.0**-8


def head_agreement(traces: TraceFolder, tables: SharedTables) -> float | None:
    """Share of positions, at most 256, whose top-1 the head computes from the last recorded layer.

    Norms that multiply by 1 + weight (Gemma) are tried as well; the larger share counts. None where
    a table is missing, or neither the target's last layer nor its top-1 is recorded.
    """
    manifest = traces.manifest
    features, last = manifest.features, manifest.target.num_layers - 1
    if features.kind != "aux" or features.aux_layer_ids[-1] != last:
        return None
    if HEAD not in tables or FINAL_NORM not in tables:
        return None
    width = features.width // len(features.aux_layer_ids)
    rows = list(_rows(traces, width))
    if not rows:
        return None
    hidden = normalized(torch.stack([row for row, _ in rows]))
    expected = torch.tensor([token for _, token in rows])
    head, norm = tables[HEAD], tables[FINAL_NORM].float()
    hidden, expected = hidden.to(head.device), expected.to(head.device)
    return max(_share(linear(hidden * weight, head), expected) for weight in (norm, 1 + norm))


def normalized(hidden: Tensor) -> Tensor:
    """Rows [R, W] divided by their root mean square: the last norm without its weight."""
    return hidden * hidden.square().mean(dim=1, keepdim=True).rsqrt()


def _share(logits: Tensor, expected: Tensor) -> float:
    """Rows [R, V] whose largest logit is, within BF16's resolution, that of the expected token."""
    largest = logits.amax(dim=1)
    chosen = logits.gather(1, expected[:, None])[:, 0]
    return float((chosen >= largest - _BF16_STEP * largest.abs()).double().mean())


def _rows(traces: TraceFolder, width: int) -> Iterator[tuple[Tensor, int]]:
    """Some positions of every prompt: the last layer's output [W] and the target's top-1 after."""
    each = max(1, MAX_ROWS // len(traces))
    for entry in traces.manifest.prompts[:MAX_ROWS]:
        trace = traces.load(entry)
        known = (trace.target_top1 >= 0).nonzero()[:, 0].tolist()[::-1]
        for row in known[:: max(1, len(known) // each)][:each]:
            yield trace.features[row, -width:].float(), int(trace.target_top1[row])
