"""The command by which SGLang serves a draft."""

import shlex

from ..contract import Question
from ..engine import Serving, flag
from ..sglang_linears import is_float16_only

_UNQUANT = "--speculative-draft-model-quantization unquant"
LAUNCH_NOTE = (
    f"{_UNQUANT} stops SGLang from giving the draft the target's quantization. It does not"
    " unquantize the draft, whose own quantization_config decides."
)


def launch(question: Question, num_draft_tokens: int, serving: Serving) -> str:
    """The server's command line. "unquant" keeps the draft from inheriting the target's method.

    What the draft itself declares then decides (`_verify_quantization`): the target's would take
    its place where both are called compatible, and would quantize a BF16 draft while loading.
    """
    tokens, blocks = num_draft_tokens, question.traits.drafts_blocks
    steps = f"--speculative-num-steps {tokens} --speculative-eagle-topk 1"
    counted = not blocks or question.traits.sglang.counts_anchor
    return serving.line(
        f"python -m sglang.launch_server --model-path {shlex.quote(serving.target)}"
        f" --tp-size {question.tp}",
        flag("--quantization", serving.quantization),
        flag("--kv-cache-dtype", _spelled(serving.target_cache_dtype)),
        f"--speculative-algorithm {question.own.served_as}",
        flag("--speculative-draft-model-path", serving.draft),
        "" if blocks else steps,
        flag("--speculative-num-draft-tokens", tokens + 1 if counted else None),
        _UNQUANT,
        flag("--speculative-draft-kv-cache-dtype", _spelled(serving.cache_dtype)),
        flag("--dtype", "float16" if is_float16_only(question) else serving.dtype),
        flag("--context-length", serving.context),
    )


def _spelled(cache_dtype: str | None) -> str | None:
    """Plain "fp8", as vLLM says for E4M3, is no choice of SGLang's."""
    return f"{cache_dtype}_e4m3" if cache_dtype == "fp8" else cache_dtype
