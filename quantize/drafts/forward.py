"""Building blocks of the drafts' forward maths, in torch.

Shapes: B sequences, T rows, H heads, D head width, W hidden width. Everything runs on the device of
the weights that it is given, in the dtype of their vectors: the norms. A matrix may be held in
another dtype: products are computed in the wider one of its own and its input's. Norms and
attention run in at least float32, as in engines. Everything may be differentiated, with respect to
weights and inputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from .rope import RopeConfig, rope_frequencies

OnInput = Callable[[str, Tensor], Tensor]
"""Called with (canonical module name, input [..., in_features]) before every linear that may be
quantized: of attention and MLP, fc, the head; what it returns, in that dtype or a wider one, is
multiplied by the weight. Rounds activations, or observes them."""

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""Attention over whatever keys the caller keeps: (layer, q [B,H,T,D], k [B,KV,T,D], v [B,KV,T,D'],
softmax scale) -> [B,H,T,D']."""

MAX_WIDENED = 2**24
"""Elements of a weight that are widened at a time: 64 MB in float32."""


class DraftForward(ABC):
    """What drafts of every kind do."""

    @property
    @abstractmethod
    def num_logits(self) -> int:
        """The draft vocabulary: the width of `logits`."""

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Target features [B, T, num_aux * W_target] -> the draft's own rows [B, T, W]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states of drafted positions [..., W] -> logits [..., draft vocabulary]."""

    def scores(self, hidden: Tensor) -> Tensor:
        """The logits before any token is ruled out, finite everywhere: what may be learned."""
        return self.logits(hidden)

    @abstractmethod
    def head_input(self, hidden: Tensor) -> Tensor:
        """What the head multiplies: hidden states [..., W], normed, as `OnInput` returns them."""

    @abstractmethod
    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids -> target-vocabulary ids, same shape."""


class ChainForward(DraftForward):
    """A draft that proposes a chain: a step reads a token and the hidden state of the last step."""

    @abstractmethod
    def step(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One draft step.

        Args:
            token_ids: [B, T] int64, target vocabulary.
            hidden: [B, T, W], from `fuse` at depth 1, from the step before after that.
            positions: [T] int64.
            attend: attention over the caller's keys.

        Returns:
            Hidden states [B, T, W], for `logits` and for the next step.
        """

    def later_input(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What a step after the first reads, of the tokens and the hidden states before it.

        Args:
            token_ids: [B, T] int64, what the steps before proposed.
            hidden: [B, T, W] of the step before.

        Returns:
            Arguments of `step`, of the same shapes.
        """
        return token_ids, hidden


class StagedForward(DraftForward):
    """A draft of several modules, each of them a chain's step: module i drafts token i + 1.

    A module goes over all rows, not over the chain's own alone: at depth i row t reads token
    t + 1 + i and what module i - 1 gave at row t, at position t, and looks at the rows before it as
    module i itself saw them. Hidden states for `logits` have the module's number behind them.
    """

    modules: Sequence[ChainForward]
    window: int | None = None
    """Rows that a query looks at, its own among them; None = all before it."""

    def logits(self, hidden: Tensor) -> Tensor:
        """See `DraftForward.logits`; [..., W + 1], all of one module."""
        return self._of(hidden).logits(hidden[..., :-1])

    def head_input(self, hidden: Tensor) -> Tensor:
        """See `DraftForward.head_input`; [..., W + 1], all of one module."""
        return self._of(hidden).head_input(hidden[..., :-1])

    def _of(self, hidden: Tensor) -> ChainForward:
        return self.modules[int(hidden[..., -1].flatten()[0])]


class TextForward(ChainForward):
    """A chain that reads the text alone: `step` reads a token at the token's own position.

    Hidden states are what `logits` reads; those given to `step` are not looked at.
    """


class HeadsForward(DraftForward):
    """A draft of several heads: each proposes one token, all from the same state of the target."""

    @abstractmethod
    def propose(self, hidden: Tensor, depth: int) -> Tensor:
        """What one head makes of the target's states.

        Args:
            hidden: [..., W], from `fuse`.
            depth: which head; it proposes the token `depth` places behind the first drafted one.

        Returns:
            [..., W'], for `logits`, which is asked about one depth at a time.
        """


class BlockForward(DraftForward):
    """A draft that proposes a whole block at once, from its anchor and the features before it."""

    @abstractmethod
    def context(self, layer: int, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that a layer keeps of verified positions.

        Args:
            layer: which decoder layer of the draft.
            rows: [B, T, W] from `fuse`.
            positions: [T] int64.

        Returns:
            Rotated keys [B, KV, T, D] and values [B, KV, T, D].
        """

    @abstractmethod
    def block(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Draft the tokens behind A anchors, each in a block of its own.

        Args:
            token_ids: [A, 1 + K] int64, target vocabulary: the last committed token of each block,
                its anchor, and the K tokens recorded behind it. A draft that chooses its tokens one
                after the other reads, for slot j, those before it: they are what it chose itself
                wherever slot j counts. Others read the anchor alone.
            positions: [A] int64, where the anchors stand.
            attend: gets the queries and keys of the blocks, [A, H, S, D] and [A, KV, S, D], for S
                slots: 1 + K, or K where the anchor's proposes the first token;
                adds the context before each anchor, under the mask of `visible`.

        Returns:
            [A, K, W'], for `logits`: entry j - 1 predicts the token at position anchor + j, from
            the hidden state of its slot and what else its proposal follows from.
        """

    @abstractmethod
    def visible(self, layer: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Which keys of the context before an anchor, and of its block, a slot of it looks at.

        Args:
            layer: which decoder layer of the draft.
            queries: positions of slots, int64.
            keys: positions of keys, int64, of a shape that broadcasts with that of `queries`.

        Returns:
            bool of the broadcast shape, True where the query looks at the key.
        """


def target_ids(d2t: Tensor | None) -> Tensor | None:
    """Target id of every draft id, from the offsets that d2t holds: id + d2t[id]; None = equal."""
    if d2t is None:
        return None
    return torch.arange(d2t.numel(), device=d2t.device) + d2t.to(torch.int64)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """The product x weight^T in the wider of the two dtypes; a narrow weight is widened in parts.

    Widening is exact, so the parts change the result by rounding only, and not at all where one
    part is all: up to 16 M elements.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features].

    Returns:
        [..., out_features].
    """
    wide = torch.promote_types(x.dtype, weight.dtype)
    x = x.to(wide)
    if weight.dtype == wide:
        return F.linear(x, weight)
    rows = max(1, MAX_WIDENED // weight.shape[1])
    parts = [F.linear(x, part.to(wide)) for part in torch.split(weight, rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def embedding(token_ids: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [..., W] of a table [V, W] that may be held in a narrower dtype."""
    return F.embedding(token_ids, table).to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Weight * x / sqrt(mean(x^2) + eps), the mean over the last axis in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def rotate(x: Tensor, positions: Tensor, rope: RopeConfig, *, interleaved: bool = False) -> Tensor:
    """Rotary embedding: every pair of dimensions i is turned by positions * frequency_i.

    Args:
        x: [B, H, T, D].
        positions: [T] int64, or [B, T] where the sequences stand at different places.
        rope: base and scaling of the frequencies.
        interleaved: pairs are (2i, 2i + 1), as in DeepSeek; else (i, i + D/2), as in neox and
            Llama.

    Returns:
        [B, H, T, D].
    """
    frequencies, factor = rope_frequencies(rope, x.shape[-1], x.device)
    angles = positions.to(torch.float64)[..., None] * frequencies
    if positions.ndim == 2:
        angles = angles[:, None]  # one for all heads
    cos, sin = (angles.cos() * factor).to(x.dtype), (angles.sin() * factor).to(x.dtype)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor) -> Tensor:
    """softmax(q k^T * scale) v, key-value heads repeated to the number of query heads.

    Args:
        q: [B, H, T, D].
        k: [B, KV, S, D].
        v: [B, KV, S, D'].
        scale: multiplies q k^T.
        visible: [T, S] bool, True where a query may look.
    """
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.transpose(-1, -2)) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    return (scores.softmax(-1) @ v).to(dtype)
