"""The command with which SGLang 0.5.23 serves a draft."""

import shlex

from . import mtp
from .contract import DFLASH_FAMILIES, Question
from .sglang import is_float16_only

_SERVED_BY = {
    **dict.fromkeys(DFLASH_FAMILIES, "DFLASH"),
    "dspark": "DSPARK",
    "eagle1-llama": "EAGLE",
    **dict.fromkeys(mtp.SGLANG, "EAGLE"),
    "language-model": "STANDALONE",
}


def launch(question: Question, num_draft_tokens: int, draft: str) -> str:
    """The server's command line. "unquant" keeps the draft from inheriting the target's method.

    What the draft itself declares then decides (`_verify_quantization`): the target's would take
    its place where both are called compatible, and would quantize a BF16 draft while loading.
    """
    algorithm = _SERVED_BY.get(question.family, "EAGLE3")
    parts = [
        f"python -m sglang.launch_server --model-path TARGET --tp-size {question.tp}",
        f"--speculative-algorithm {algorithm} --speculative-draft-model-path {shlex.quote(draft)}",
    ]
    if not question.is_dflash:
        parts.append(
            f"--speculative-num-steps {num_draft_tokens} --speculative-eagle-topk 1"
            f" --speculative-num-draft-tokens {num_draft_tokens + 1}"
        )
    if algorithm == "DSPARK":  # which counts the anchor: `dspark_config.py:49`
        parts.append(f"--speculative-num-draft-tokens {num_draft_tokens + 1}")
    parts.append("--speculative-draft-model-quantization unquant")
    if is_float16_only(question):
        parts.append("--dtype float16")
    return " ".join(parts)
