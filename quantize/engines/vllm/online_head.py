"""Which drafts' heads vLLM 0.33.0 quantizes while it loads them: `draft_lm_head_quantization`.

Sources: `config/speculative.py:1953`, `v1/worker/gpu/spec_decode/eagle/utils.py:110-134`,
`layers/quantization/online/lm_head.py`; of the GPUs, `online/fp8.py:416` and
`kernels/linear/nvfp4/marlin.py:22`.
"""

from ....recipes.formats import NUMBER_FORMATS, OnlineHead
from ...drafts.family import Draft
from ...gpus import Gpu


def online_head_problem(draft: Draft, head: OnlineHead, gpu: Gpu | None = None) -> str | None:
    """Why vLLM does not serve this draft with its head quantized online; None where it does.

    Args:
        draft: the folder that is served.
        head: what its head would be quantized to.
        gpu: where; None = wherever it can be.
    """
    served = draft.family.engine_traits.vllm
    if not served.takes_online_heads:
        return f"vLLM 0.33 refuses draft_lm_head_quantization for method '{served.served_as}'"
    geometry = draft.geometry
    if geometry.draft_vocab_size != geometry.vocab_size:
        return "vLLM 0.33 quantizes online only a head that is the target's, and this one is cut"
    if draft.row("lm_head.weight") is not None:
        return (
            "vLLM 0.33 quantizes online only a head that is the target's: this draft has a head of"
            " its own, with which vLLM stops unless it equals the target's in every element"
        )
    if gpu is not None and head in NUMBER_FORMATS and gpu.arch.startswith("gfx"):
        return f"vLLM 0.33 has no kernel for {head.upper()} weights alone on {gpu.name}"
    if gpu is not None and head not in NUMBER_FORMATS and head not in gpu.peaks:
        return f"vLLM 0.33 refuses an online {head.upper()} head on {gpu.name}: it has no unit"
    return None
