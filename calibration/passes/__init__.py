"""Forward passes of a draft along traces: chains or blocks, several prompts at once, any device."""

from dataclasses import dataclass
from typing import Literal

from ...recipes.formats import AS_STORED, ServedForm
from ...recipes.listener import Heard
from ...recipes.regular_file import AnyPath

ComputeDtype = Literal["float32", "bfloat16"]
DraftSampling = Literal["greedy", "probabilistic", "block"]
"""How a draft chooses proposals: its most likely tokens, or draws at the target's temperature.

Greedy is the default of vLLM (`draft_sample_method`) and SGLang, whatever the target's temperature;
"probabilistic" is vLLM's word, SGLang's is `speculative_use_rejection_sampling`. Both engines draw
from all tokens of the draft: only the target has top-p and top-k. "block" proposals are drawn as
well, and verified as a block (vLLM's `rejection_sample_method` "block", SGLang's
`speculative_use_block_verification`); both rules accept the same of greedy proposals."""


@dataclass(frozen=True, kw_only=True)
class Passes(Heard):
    """How drafts run along traces; None = own K, the traces' target, as many as memory allows."""

    num_draft_tokens: int | None = None
    target: AnyPath | None = None
    device: str = "auto"
    dtype: ComputeDtype = "float32"
    draft_sampling: DraftSampling = "greedy"
    batch_size: int | None = None

    @property
    def rotary_base(self) -> float | None:
        """The rotary base that replaces that of config.json."""
        return None

    @property
    def served(self) -> ServedForm:
        """What an engine makes of each draft except the reference, the first of several."""
        return AS_STORED

    def served_forms(self, count: int) -> list[ServedForm]:
        """What an engine makes of each of `count` drafts."""
        as_stored = min(1, count - 1)
        return [AS_STORED] * as_stored + [self.served] * (count - as_stored)


@dataclass(frozen=True, kw_only=True)
class OnTraces(Passes):
    """How and where drafts are replayed; `no_cache`: nothing is recalled or kept."""

    no_cache: bool = False

    @property
    def ray_address(self) -> str | None:
        """Address of the Ray cluster that computes the proposals; None = this process does."""
        return None
