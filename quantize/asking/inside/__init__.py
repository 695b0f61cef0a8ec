"""What runs in the engine's own interpreter, as the top-level package `inside`.

It imports nothing of draftquant. Only `in_vllm` and `in_sglang` touch the insides of engines.
"""
