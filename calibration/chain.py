"""The teacher-forced draft chain: every draft step of every position of a trace, a block at a time.

Row t pairs the hidden state of position t with token t + 1. At depth j (0-based) it reads token
t + 1 + j at position t + j, attends to the depth-0 rows up to t and to its own rows of depth
1 .. j, and predicts token t + 2 + j. A live chain feeds back its own tokens; those equal the
recorded ones for as long as every earlier depth was right, and only then does a later depth count.

Rows are evaluated in blocks, so logits and attention scores stay bounded however long the trace is.
"""

import torch
from torch import Tensor

from ..quantize.drafts.forward import ChainForward
from .errors import CalibrationError

BLOCK_ROWS = 256
_MAX_SCORES = 2**24  # elements of one attention score matrix, all heads together: 64 MB in float32


@torch.inference_mode()
def chain_predictions(
    forward: ChainForward,
    hidden: Tensor,
    token_ids: Tensor,
    *,
    first_row: int,
    num_draft_tokens: int,
    block_rows: int = BLOCK_ROWS,
) -> Tensor:
    """Draft `num_draft_tokens` tokens from every row whose whole chain lies inside the trace.

    Args:
        forward: the draft.
        hidden: [N - 1, W], first hidden states, from position 0 on.
        token_ids: [N] int64.
        first_row: rows before it are context only: depth 0 is evaluated, nothing is predicted.
        num_draft_tokens: depths K, at least 1.
        block_rows: rows evaluated together; changes the result by rounding only.

    Returns:
        [R, K] int64 target-vocabulary ids: row i, column j is the draft's token for position
        first_row + i + 2 + j; R = max(0, N - 1 - K - first_row).

    Raises:
        CalibrationError: a hidden state is NaN or infinite.
    """
    num_rows = max(0, token_ids.shape[0] - 1 - num_draft_tokens)
    predicted = token_ids.new_empty((max(0, num_rows - first_row), num_draft_tokens))
    if len(predicted) == 0:
        return predicted
    attention = _ChainAttention(num_rows)
    for start in range(0, num_rows, block_rows):
        stop = min(start + block_rows, num_rows)
        first, x = start, hidden[None, start:stop]
        for depth in range(num_draft_tokens):
            attention.begin(first, depth)
            tokens = token_ids[None, first + 1 + depth : stop + 1 + depth]
            positions = torch.arange(first + depth, stop + depth)
            logits, x = forward.step(tokens, x, positions, attention)
            if not bool(torch.isfinite(x).all()):
                raise CalibrationError(
                    f"draft step {depth + 1}",
                    "hidden states are NaN or infinite",
                    fix="inspect the draft's weights and scales",
                )
            if depth == 0:  # from here on only the rows that start a chain
                first = max(start, first_row)
                if first >= stop:
                    break
                logits, x = logits[:, first - start :], x[:, first - start :]
            ids = forward.to_target(logits.argmax(-1))[0]
            predicted[first - first_row : stop - first_row, depth] = ids
    return predicted


class _ChainAttention:
    """`Attend` of the chain: depth-0 keys of all rows so far, deeper keys of the current block."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._context: dict[int, tuple[Tensor, Tensor]] = {}
        self._own: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._first, self._depth = 0, 0

    def begin(self, first_row: int, depth: int) -> None:
        """Announce the rows (first_row and following) and the depth of the next step."""
        self._first, self._depth = first_row, depth
        if depth == 0:
            self._own = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if self._depth == 0:
            keys, values = self._context_of(layer, k, v)
            stop = self._first + k.shape[2]
            keys[:, :, self._first : stop], values[:, :, self._first : stop] = k, v
        else:
            self._own.setdefault(layer, []).append((k, v))
        own = self._own.get(layer, [])
        context = self._context[layer]
        rows = max(1, _MAX_SCORES // (q.shape[1] * self._num_rows))
        parts = [
            _attend(
                q[:, :, i : i + rows],
                context,
                [(key[:, :, i : i + rows], value[:, :, i : i + rows]) for key, value in own],
                self._first + i,
                scale,
            )
            for i in range(0, q.shape[2], rows)
        ]
        return torch.cat(parts, dim=2)

    def _context_of(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self._context:
            batch, heads = k.shape[:2]
            self._context[layer] = (
                k.new_empty((batch, heads, self._num_rows, k.shape[3])),
                v.new_empty((batch, heads, self._num_rows, v.shape[3])),
            )
        return self._context[layer]


def _attend(
    q: Tensor,
    context: tuple[Tensor, Tensor],
    own: list[tuple[Tensor, Tensor]],
    first_row: int,
    scale: float,
) -> Tensor:
    """Softmax over the context keys of rows <= t and the row's own chain keys.

    Args:
        q: [B, H, T, D] of rows first_row, first_row + 1, ...
        context: keys [B, KV, S, D] and values [B, KV, S, D'].
        own: per deeper step, keys [B, KV, T, D] and values [B, KV, T, D'] of the same rows.
        first_row: position of the first query among the context rows.
        scale: multiplies q k^T.

    Returns:
        [B, H, T, D'].
    """
    count = q.shape[2]
    seen = first_row + count
    keys, values = (tensor[:, :, None, :seen] for tensor in context)
    # [B, KV, G, T, D]: G query heads share one key
    grouped = q.reshape(q.shape[0], keys.shape[1], -1, *q.shape[2:])
    scores = (grouped @ keys.transpose(-1, -2)) * scale
    rows = torch.arange(first_row, seen)
    hidden_keys = torch.arange(seen) > rows[:, None]
    scores = scores.masked_fill_(hidden_keys, float("-inf"))
    own_scores = [(grouped * k[:, :, None]).sum(-1, keepdim=True) * scale for k, _ in own]
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = torch.cat([scores, *own_scores], dim=-1).softmax(-1, dtype=wide).to(q.dtype)
    mixed = weights[..., :seen] @ values
    for i, (_, v) in enumerate(own):
        mixed = mixed + weights[..., seen + i, None] * v[:, :, None]
    return mixed.flatten(1, 2)
