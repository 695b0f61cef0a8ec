"""A head of fewer rows than the vocabulary in SGLang 0.5.23.

Sources: loading and proposing executed (`tests/engines/RESULTS.md`); `llama_eagle3.py:303`,
`kimi_k25_eagle3.py:351` and `init_lm_head` of `eagle_worker_v2.py:336`.
"""

from collections.abc import Iterator

from ...drafts.engine_traits import Finding
from ..contract import CutHead, Question
from ..sglang_config import is_ordinary


def cut_head(question: Question, head: CutHead) -> Iterator[Finding]:
    """The head that it builds has as many rows as config.json declares; of null it is whole."""
    if is_ordinary(question) or question.is_tied:
        return
    built = head.built if head.is_declared else head.vocabulary
    if head.stored not in (None, built):
        text = (
            f"AssertionError: self.org_vocab_size={built} self.use_presharded_weights=False"
            f" loaded_weight.shape[output_dim]={head.stored}"
        )
        yield Finding("load", text, f"write draft_vocab_size {head.stored}")
    if head.stored is None and not head.is_declared and head.mapped not in (None, head.vocabulary):
        yield Finding(
            "wrong",
            f"No lm_head is stored: SGLang serves the target's whole head, and looks its"
            f" {head.vocabulary} rows up in d2t, which has {head.mapped}",
            "store the rows of lm_head that d2t stands for, and draft_vocab_size",
        )
