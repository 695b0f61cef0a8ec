"""Embedding and head that a draft borrows, where the target stores them quantized.

Sources: vLLM 0.33 hands on the module with its own kernel (`v1/worker/gpu/spec_decode/eagle/
utils.py:104`, `dflash/utils.py:62`, `dspark/utils.py:134`). SGLang 0.5.23 puts the target's
`weight` into the draft's head (`eagle_worker_v2.py:337`; executed for EAGLE-1 with 4-bit values,
whose error this is), which keeps the kernel of floats but for
Qwen3.5's and Nemotron's MTP layers (`set_lm_head_from_target`); DFlash, DFlash2 and DSpark project
through the target's head with its own kernel (`models/dflash.py:106`, `models/dspark.py:128`).
"""

from collections.abc import Iterator

from ..drafts.engine_traits import EngineTraits
from ..stored.table_names import HEAD
from .pair import Pair, PairFinding


def quantized_head(pair: Pair) -> Iterator[PairFinding]:
    """A target's quantized head that becomes the draft's."""
    if not _borrows(pair, pair.family.engine_traits):
        return
    stored = pair.target.is_stored_quantized("lm_head")
    if stored is None:
        yield PairFinding(
            "note",
            "shared-head",
            "the draft borrows the target's head; how the target stores it is not known, because"
            " its shards are not there",
            "give the target's folder with its shards",
        )
    if not stored:
        return
    if pair.family.engine_traits.drafts_blocks:
        yield PairFinding(
            "note",
            "shared-head",
            "the draft borrows the target's head, which is stored quantized: vLLM 0.33 and SGLang"
            " 0.5.23 project through its own kernel; SGLang before that ended with 'requires a"
            " dense FP16/BF16/FP32 target lm_head' or a shape error",
            "serve with these versions or later",
        )
        return
    yield PairFinding(
        "refused",
        "shared-head",
        "the draft borrows the target's head, which is stored quantized: SGLang puts its packed"
        " values into a head that it computes as floats, and ends with an error at the first"
        " proposal [RuntimeError: mat1 and mat2 shapes cannot be multiplied]",
        "store the head with the draft (lm_head.weight in BF16), keep the target's head in BF16, or"
        " serve the pair with vLLM, which shares the head with its kernel",
        "sglang",
    )


def _borrows(pair: Pair, traits: EngineTraits) -> bool:
    """Whether the target's head is used: the draft stores none, or engines build none for it."""
    if pair.is_whole_model:
        return False
    canonical = {pair.family.canonical_name(name) for name in pair.draft.tensors}
    return HEAD not in canonical or traits.sglang.shares_tables
