"""The command by which SGLang serves a draft."""

import shlex

from ..contract import Question
from .modules import is_float16_only

_UNQUANT = "--speculative-draft-model-quantization unquant"
LAUNCH_NOTE = (
    f"{_UNQUANT} stops SGLang from giving the draft the target's quantization. It does not"
    " unquantize the draft, whose own quantization_config decides."
)


def launch(question: Question, num_draft_tokens: int, draft: str) -> str:
    """The server's command line. "unquant" keeps the draft from inheriting the target's method.

    What the draft itself declares then decides (`_verify_quantization`): the target's would take
    its place where both are called compatible, and would quantize a BF16 draft while loading.
    """
    algorithm = question.own.served_as
    parts = [
        f"python -m sglang.launch_server --model-path TARGET --tp-size {question.tp}",
        f"--speculative-algorithm {algorithm} --speculative-draft-model-path {shlex.quote(draft)}",
    ]
    if not question.traits.drafts_blocks:
        parts.append(
            f"--speculative-num-steps {num_draft_tokens} --speculative-eagle-topk 1"
            f" --speculative-num-draft-tokens {num_draft_tokens + 1}"
        )
    if question.traits.sglang.counts_anchor:
        parts.append(f"--speculative-num-draft-tokens {num_draft_tokens + 1}")
    parts.append(_UNQUANT)
    if is_float16_only(question):
        parts.append("--dtype float16")
    return " ".join(parts)
