"""Serve one draft with the real vLLM on a CPU, and print what it did as one line of JSON.

Runs in the environment that `setup` makes; nothing of draftquant is imported.
Usage: `serve.py TARGET PROMPTS DRAFT --method eagle3 -k 3`.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_INT4_W4A8": "0",  # or INT4 weights get INT8 activations, which no recipe declares
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: errors arrive as they were raised
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> int:
    """Exit status 0, also where the engine refuses the draft: then the line has its error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path)
    parser.add_argument("prompts", type=Path, help="JSON lines with token_ids")
    parser.add_argument("draft", type=Path)
    parser.add_argument("--method", choices=("eagle3", "dflash"))
    parser.add_argument("-k", "--num-draft-tokens", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--kv-cache-dtype", help="of the draft's KV cache alone")
    parser.add_argument("--plugin", action="store_true", help="with draftquant's plugin")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT, VLLM_PLUGINS="draftquant" if options.plugin else "")
    answers = os.dup(1)  # the engine prints to stdout too
    os.dup2(2, 1)
    try:
        answer = _serve(options)
    except Exception as exc:  # noqa: BLE001 - whatever the engine says is the answer
        answer = {"error": " ".join(f"{type(exc).__name__}: {exc}".split())}
    os.write(answers, (json.dumps(answer) + "\n").encode())
    return 0


def _serve(options: argparse.Namespace) -> dict[str, Any]:
    import vllm

    lines = options.prompts.read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["token_ids"] for line in lines]
    speculative = {
        "method": options.method,
        "model": str(options.draft),
        "num_speculative_tokens": options.num_draft_tokens,
    }
    if options.kv_cache_dtype:
        speculative["kv_cache_dtype"] = options.kv_cache_dtype
    limits = {"max_model_len": 512, "max_num_seqs": 16, "enable_prefix_caching": False}
    how = {"enforce_eager": True, "per_request_spec_decode_metrics": "detailed", **limits}
    engine = vllm.LLM(model=str(options.target), speculative_config=speculative, **how)
    greedy = vllm.SamplingParams(temperature=0, max_tokens=options.max_new_tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], greedy)
    seconds = time.perf_counter() - began
    completions = [output.outputs[0] for output in outputs]
    return {
        "vllm": vllm.__version__,
        "seconds": seconds,
        "token_ids": [list(done.token_ids) for done in completions],
        "accepted": [list(done.spec_decode_metrics.per_step_accepted) for done in completions],
    }


if __name__ == "__main__":
    sys.exit(main())
