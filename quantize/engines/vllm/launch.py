"""The command by which vLLM serves a draft."""

import json
import shlex

from ..contract import Question
from ..engine import Serving, flag


def launch(question: Question, num_draft_tokens: int, serving: Serving) -> str:
    """The server's command line; what is the draft's stands in `--speculative-config`.

    Without `draft_tensor_parallel_size` the draft is split as the target is. Of another number than
    the target's only 1 is taken (`config/speculative.py:1849`), and then only DSpark's and a
    language model's loaders look at it.
    """
    config = {
        "method": question.own.served_as,
        **({"model": serving.draft} if serving.draft is not None else {}),
        "num_speculative_tokens": num_draft_tokens,
        **({"parallel_drafting": True} if question.is_parallel else {}),
        **({"draft_tensor_parallel_size": question.tp} if question.tp > 1 else {}),
        **({"kv_cache_dtype": serving.cache_dtype} if serving.cache_dtype else {}),
    }
    return serving.line(
        f"vllm serve {shlex.quote(serving.target)} --tensor-parallel-size {question.tp}",
        flag("--quantization", serving.quantization),
        flag("--dtype", serving.dtype),
        flag("--kv-cache-dtype", serving.target_cache_dtype),
        flag("--max-model-len", serving.context),
        f"--speculative-config {shlex.quote(json.dumps(config))}",
    )
