"""A head of fewer rows than the vocabulary in vLLM 0.33.0.

Sources: loading and proposing executed (`tests/engines/RESULTS.md`); `_should_share` of
`v1/worker/gpu/spec_decode/eagle/utils.py:24` and `llm_base_proposer.py:1513`, which put the head of
the target in the place of one that is not stored, whatever its size.
"""

from collections.abc import Iterator

from ...drafts.engine_traits import Finding
from ..contract import CutHead, Question


def cut_head(_question: Question, head: CutHead) -> Iterator[Finding]:
    """The head that it builds has as many rows as config.json declares."""
    if head.stored is None and head.is_cut:
        yield Finding(
            "wrong",
            f"No lm_head is stored: vLLM puts the target's in its place, and takes the first"
            f" {head.built} rows of it for the tokens of d2t",
            "store the rows of lm_head that d2t stands for",
        )
    if head.stored in (None, head.built) or not head.is_declared:
        return
    if head.mapped not in (None, head.built) and head.is_cut:
        text = (
            f"AssertionError: Attempted to load weight (torch.Size([{head.mapped}])) into parameter"
            f" (torch.Size([{head.built}]))"
        )
    else:
        text = (
            "AssertionError: vllm/model_executor/layers/vocab_parallel_embedding.py:515: assert"
            " loaded_weight.shape[output_dim] == self.org_vocab_size"
        )
    yield Finding("load", text, f"write draft_vocab_size {head.stored}, if d2t has as many rows")
