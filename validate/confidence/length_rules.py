"""The rules by which engines shorten a verify step, as far as they are arithmetic.

Both engines take the number of drafted tokens d that emits most per second,

    argmax over d of (1 + S_1 + .. + S_d) / seconds(d),

S_j being the survival that the confidence head foretold an earlier step of the request, for its
own one is still on the GPU when the batch is sized. With one request at a time, and with the
seconds given, nothing of it is left to chance:

    vLLM    S of the step before (1 for the first step), all d verified.
            Source: 0.33 `v1/worker/gpu/spec_decode/adaptive_verification.py:279-373`.
    SGLang  S of two steps before (1 for the first two), those of at least 1e-6; of d tokens
            those are verified whose own survival is at least 1e-6.
            Source: 0.5.23 `speculative/dspark_components/dspark_planner.py:867-1030`,
            `kernels/ops/speculative/dspark/dspark_schedule.py:64`.

In a batch of many requests the engines admit the drafted tokens of highest survival of all of
them: each request verifies its tokens down to one common survival, which the load decides. That is
the rule of a threshold, with no engine's name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from ..errors import ReplayError
from .cost_tables import MeasuredCosts, SGLangTable, read_measured_costs, read_sglang_table
from .shortened import LengthRule

OPTION = "--confidence"
_SGLANG_LEAST = 1e-6
"""Source: SGLang 0.5.23 `dspark_planner.py:843`, `survival_eps`."""
_REFUSED: Mapping[str, tuple[str, str]] = MappingProxyType({
    "vllm": (
        "vLLM 0.33 divides the expected tokens by milliseconds that it measures when it starts"
        " (v1/worker/gpu/spec_decode/adaptive_verification.py:235), so without them nothing tells"
        " what it verifies",
        f"give them: {OPTION} vllm:COSTS.json; or a threshold such as {OPTION} 0.3",
    ),
    "sglang": (
        "SGLang 0.5.23 decides by its table of costs (--speculative-dspark-sps-table-path), and"
        " without one it verifies every token",
        f"give the table: {OPTION} sglang:TABLE.json; or a threshold such as {OPTION} 0.3",
    ),
    "speculative-adaptive": (
        "SGLang 0.5.23 (adaptive_spec_params.py:153) sets one number of draft tokens for the whole"
        " batch, by a moving average over all requests that were served before: what one text gets"
        " depends on the others; and it does so for EAGLE drafts alone",
        f"give a threshold such as {OPTION} 0.3, or replay with other -k",
    ),
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """Verify the drafted tokens whose survival is at least a threshold, in [0, 1]."""

    survival: float

    @property
    def name(self) -> str:
        """For people."""
        return f"survival of at least {self.survival:g}"

    def length(self, confidences: Sequence[Tensor]) -> int:
        """See `LengthRule`: survival only falls along a block."""
        return int((confidences[-1].cumprod(0) >= self.survival).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangRule:
    """SGLang's, for one request at a time and `--disable-overlap-schedule`."""

    table: SGLangTable
    name: str = "SGLang 0.5.23, one request at a time"

    def length(self, confidences: Sequence[Tensor]) -> int:
        """See `LengthRule`."""
        if self.table.tells_nothing:
            return len(confidences[-1])
        foretold = _earlier(confidences, 2).cumprod(0)
        kept = foretold[foretold >= _SGLANG_LEAST].double()
        budget = int(self.table.throughput(_emitted(kept)).argmax())
        return min(budget, int((confidences[-1].cumprod(0) >= _SGLANG_LEAST).sum()))


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRule:
    """vLLM's, for one request at a time, whose prompt was prefilled in one step."""

    costs: MeasuredCosts
    name: str = "vLLM 0.33, one request at a time"

    def length(self, confidences: Sequence[Tensor]) -> int:
        """See `LengthRule`."""
        emitted = _emitted(_earlier(confidences, 1).double().cumprod(0))
        costs = torch.tensor(self.costs.verify_ms, dtype=torch.float64)
        if len(costs) < len(emitted):
            raise ReplayError(
                OPTION,
                f"verify_ms has the costs of 1 to {len(costs)} tokens, but a step verifies up to"
                f" {len(emitted)}",
                fix="write one for each of 1 to K + 1 tokens",
            )
        return int((emitted / (self.costs.draft_ms + costs[: len(emitted)])).argmax())


def length_rule(text: str) -> LengthRule:
    """What `--confidence` names.

    Args:
        text: a threshold in [0, 1], sglang:FILE or vllm:FILE.

    Raises:
        ReplayError: it is none of them, an engine's rule that nothing decides, or its file cannot
            be read.
    """
    engine, colon, file = text.partition(":")
    if colon and engine == "sglang":
        return SGLangRule(table=read_sglang_table(Path(file)))
    if colon and engine == "vllm":
        return VllmRule(costs=read_measured_costs(Path(file)))
    if text in _REFUSED:
        what, fix = _REFUSED[text]
        raise ReplayError(f"{OPTION} {text}", what, fix=fix)
    try:
        survival = float(text)
    except ValueError:
        survival = -1.0
    if not 0 <= survival <= 1:
        raise ReplayError(
            f"{OPTION} {text}",
            "expected a survival from 0 to 1, sglang:TABLE.json or vllm:COSTS.json",
            fix=f"give a threshold such as {OPTION} 0.3",
        )
    return Threshold(survival=survival)


def _earlier(confidences: Sequence[Tensor], steps: int) -> Tensor:
    """Those of some steps before; 1 where the request had none."""
    if len(confidences) > steps:
        return confidences[-1 - steps]
    return torch.ones_like(confidences[-1])


def _emitted(survival: Tensor) -> Tensor:
    """[n + 1] expected tokens of a step that verifies 0 .. n drafted tokens of [n] survivals."""
    return 1 + torch.cat((survival.new_zeros(1), survival.cumsum(0)))
