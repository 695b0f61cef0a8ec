"""What an acceptance length is of: how text and proposals were chosen, and what is counted."""

from typing import Literal

from ...calibration.traces.manifest import Sampling

DraftSampling = Literal["greedy", "probabilistic"]
"""How a draft chooses its proposals: its most likely tokens, or drawn at the target's temperature.

Greedy is the default of vLLM (`draft_sample_method`) and SGLang whatever the target's temperature;
"probabilistic" is vLLM's word, SGLang's is `speculative_use_rejection_sampling`. Both engines draw
from all tokens of the draft: top-p and top-k are the target's alone."""

CONVENTION = "accepted draft tokens + 1 bonus token per verify step, pooled; prefill not counted"


def estimand(temperature: float, sampling: Sampling | None, draft_sampling: DraftSampling) -> str:
    """In words, for reports.

    Args:
        sampling: how it was drawn, None = greedily.
    """
    counted = "speculative decoding of recorded traces, verify steps whose outcome is fully known"
    if sampling is None:
        return f"greedy {counted}"
    drawn = f"temperature {temperature:g}"
    if sampling.top_p < 1:
        drawn += f", top-p {sampling.top_p:g}"
    if sampling.top_k:
        drawn += f", top-k {sampling.top_k}"
    proposals = {
        "greedy": "proposals are the draft's most likely tokens",
        "probabilistic": "expected over proposals that are drawn at that temperature",
    }
    return f"sampled ({drawn}) {counted}; {proposals[draft_sampling]}"
