"""What drafts of every kind compute, and the passes of a draft along recorded tokens.

Row t of a trace knows the tokens up to t + 1 and the target's features up to t; at depth j
(0-based) it predicts token t + 2 + j. B sequences, T rows, H heads, D head width, W hidden width.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

from typing_extensions import override

from ...recipes.errors import ForwardError
from .geometry import Geometry
from .maths import Product, Tensor, largest_of, linear, rms_norm, sum_of, target_ids, torch

OnInput = Callable[[str, Tensor], Tensor]
"""Called with (canonical module name, input [..., in_features]) before every linear that may be
quantized: in attention and MLP, fc, the head and what corrects it; the result, in that dtype or a
wider one, is multiplied by the weight. Rounds activations, or observes them."""

OnCache = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Called with (number of the decoder layer, keys [B, KV, T, D], values [B, KV, T, D']) as they
enter the KV cache; attention reads the result, in those dtypes or wider ones. Keys
are normed and rotated. MLA caches [B, 1, T, latent + rotated part] as keys, and
nothing, [B, 1, T, 0], for values."""

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""Attention over whatever keys the caller keeps: (layer, q [B,H,T,D], k [B,KV,T,D], v [B,KV,T,D'],
softmax scale) -> [B,H,T,D']."""

Alive = Callable[[], Tensor | None]
"""Called when a caller has looked at a pass: which of its rows may be drafted deeper, [n] int64
indices into its hidden states with their first two axes merged; None = all."""

BLOCK_ROWS = 256
"""Rows, or slots of blocks, that are evaluated together."""
MAX_SCORES = 2**24
"""Elements of one attention score matrix, all heads together: 64 MB in float32."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftPass:
    """What a draft computed at R evenly spaced rows of the trace, for D successive draft steps.

    Attributes:
        where: the rows in words, for errors.
        hidden: [B, R, D, W], from which `DraftForward.logits` predicts the tokens of the target's
            positions row + 2 + depth; [1, n, D, W] where only some rows were drafted that deep.
        kept: [n] int64, those rows: indices in the B * R rows, sequence by sequence. None = all.
    """

    rows: range
    depths: range
    where: str
    hidden: Tensor
    kept: Tensor | None = None


class DraftForward(ABC):
    """What drafts of every kind do, over weights given by canonical name."""

    def __init__(
        self, geometry: Geometry, weights: Mapping[str, Tensor], on_input: OnInput
    ) -> None:
        self.geometry = geometry
        self.weights = weights
        self.on_input = on_input
        self.on_cache: OnCache = lambda _layer, keys, values: (keys, values)
        self._target_ids = target_ids(weights.get("d2t"))

    def caching(self, on_cache: OnCache) -> Self:
        """The same maths over the same weights, with keys and values going through `on_cache`."""
        forward = copy(self)
        forward.on_cache = on_cache
        return forward

    @property
    def num_logits(self) -> int:
        """The draft vocabulary: the width of `logits`."""
        return self.geometry.draft_vocab_size

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [B, T, num_aux * W_target] -> the draft's own rows [B, T, W]."""
        return features

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states of drafted positions [..., W] -> logits [..., draft vocabulary]."""

    def largest_logits(self, hidden: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """The largest logits of [n, W] and their draft ids, the first of equal ones, both [n].

        At most `most` logits are held at once, or one row's if that is more.
        """
        together = max(1, most // self.num_logits)
        largest = [self.logits(some).max(-1) for some in torch.split(hidden, together)]
        return torch.cat([top for top, _ in largest]), torch.cat([ids for _, ids in largest])

    def scores(self, hidden: Tensor) -> Tensor:
        """The logits before any token is excluded, finite everywhere: what may be learned."""
        return self.logits(hidden)

    @abstractmethod
    def head_input(self, hidden: Tensor) -> Tensor:
        """The input of the head: hidden states [..., W], normed, as `OnInput` returns them."""

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids -> target-vocabulary ids, same shape."""
        return draft_ids if self._target_ids is None else self._target_ids[draft_ids]

    def passes(
        self,
        hidden: Tensor,
        token_ids: Tensor,
        *,
        rows: range,
        num_draft_tokens: int,
        block_rows: int = BLOCK_ROWS,
        alive: Alive | None = None,
    ) -> Iterator[DraftPass]:
        """Draft from some rows of a trace, teacher-forced along the recorded tokens: `Drafting`."""
        return self.drafted(
            Drafting(hidden, token_ids, rows, num_draft_tokens, block_rows=block_rows, alive=alive)
        )

    @abstractmethod
    def drafted(self, asked: "Drafting") -> Iterator[DraftPass]:
        """The passes that together hold each of the rows at every depth 0 .. K - 1 once.

        Leaves out what `alive` excludes. ForwardError: the draft computes NaN or infinity.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Drafting:
    """What a draft is asked to compute along recorded tokens.

    With gradients enabled every pass keeps its graph, and the graphs of all passes share the keys
    of the context: add up a loss over the passes, then go backward once. Nothing that a gradient
    needs is overwritten.

    Attributes:
        hidden: [B, N - 1, W], from `fuse`, from position 0 on.
        token_ids: [B, N] int64. Nothing looks ahead, so shorter sequences may be padded at the end.
        rows: whose chains or blocks are drafted, each with all its K predictions inside the trace
            (`whole_rows`); other rows are only context.
        num_draft_tokens: K, at least 1 and no more than the draft can propose.
        block_rows: rows (for a block draft, slots) of each sequence evaluated together; affects
            only the rounding of the result.
        alive: which rows the caller will look at next; it then checks that these are
            finite; None = all. Rows that others need, or that share a pass with others, are
            drafted regardless. The rounding of an input must not depend on other rows.
    """

    hidden: Tensor
    token_ids: Tensor
    rows: range
    num_draft_tokens: int
    block_rows: int
    alive: Alive | None

    @property
    def num_rows(self) -> int:
        """Rows up to the last drafted one."""
        return self.rows[-1] + 1 if self.rows else 0

    def blocks(self) -> Iterator[tuple[range, range]]:
        """Rows that are evaluated together, and those of them that are drafted."""
        for start in range(0, self.num_rows, self.block_rows):
            stop, rows = min(start + self.block_rows, self.num_rows), self.rows
            yield range(start, stop), rows[bisect_left(rows, start) : bisect_left(rows, stop)]

    def checked(self, x: Tensor, where: str) -> Tensor:
        """The values, unchanged; a caller checks that they are finite."""
        return x if self.alive else finite(x, where)


def whole_rows(num_tokens: int, num_draft_tokens: int, *, first_row: int) -> range:
    """The rows from `first_row` on whose predictions all lie inside a trace of `num_tokens`."""
    return range(first_row, max(first_row, num_tokens - 1 - num_draft_tokens))


def positions(steps: range, device: "torch.device") -> Tensor:
    """[len(steps)] int64."""
    return torch.arange(steps.start, steps.stop, steps.step, device=device)


_Check = tuple[Tensor, str, str]
"""Whether all were finite, [] bool; where, and what."""
_LATER: ContextVar[list[_Check] | None] = ContextVar("checks that are made later", default=None)


def finite(values: Tensor, where: str, what: str = "hidden states") -> Tensor:
    """The values, unchanged; ForwardError where one is NaN or infinite, here or at the end."""
    check = (torch.isfinite(values).all(), where, what)
    later = _LATER.get()
    if later is None:
        _raise_first([check])
    else:
        later.append(check)
    return values


@contextmanager
def checked_at_the_end() -> Iterator[None]:
    """Check all calls of `finite` inside at once, at the end: a GPU need not wait each time."""
    checks: list[_Check] = []
    token = _LATER.set(checks)
    try:
        yield
    finally:
        _LATER.reset(token)
    _raise_first(checks)


def _raise_first(checks: list[_Check]) -> None:
    if not checks or bool(torch.stack([fine for fine, _, _ in checks]).all()):
        return
    where, what = next((where, what) for fine, where, what in checks if not bool(fine))
    raise not_finite(where, what)


def not_finite(where: str, what: str) -> ForwardError:
    """The error where something is NaN or infinite."""
    return ForwardError(
        where,
        f"{what} are NaN or infinite",
        fix="its weights are finite, so one is far too large, or an input is: compare norms and"
        " scales with those that it was exported from",
    )


class ModulesForward(DraftForward):
    """A draft of linears, some with biases, and norms; its logits are sums of products."""

    geometry: Any

    def products(self, hidden: Tensor) -> Sequence[Product]:
        """The products whose sum is the logits of hidden states [..., W]."""
        return [(self.head_input(hidden), self.head())]

    def head(self) -> Tensor:
        """The weight that gives logits."""
        return self.weights["lm_head.weight"]

    @override
    def head_input(self, hidden: Tensor) -> Tensor:
        return self.on_input("lm_head", self.norm("norm", hidden))

    @override
    def logits(self, hidden: Tensor) -> Tensor:
        return sum_of(self.products(hidden))

    @override
    def largest_logits(self, hidden: Tensor, most: int) -> tuple[Tensor, Tensor]:
        # Each part of the weights is widened once for all rows.
        return largest_of(self.products(hidden), most)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]; `OnInput` sees the input first."""
        return self.kept_linear(name, self.on_input(name, x)).to(x.dtype)

    def kept_linear(self, name: str, x: Tensor) -> Tensor:
        """The same, in the dtype of the product; nothing observes or rounds the input."""
        product = linear(x, self.weights[f"{name}.weight"])
        bias = self.weights.get(f"{name}.bias")
        return product if bias is None else product + bias.to(product.dtype)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMS norm over the last axis, with the draft's own epsilon."""
        return rms_norm(x, self.weights[f"{name}.weight"], self.geometry.rms_norm_eps)


def gated_mlp(prefix: str, x: Tensor, modules: ModulesForward) -> Tensor:
    """down(silu(gate x) * up x)."""
    gate, up = modules.linear(prefix + "gate_proj", x), modules.linear(prefix + "up_proj", x)
    return modules.linear(prefix + "down_proj", torch.nn.functional.silu(gate) * up)
