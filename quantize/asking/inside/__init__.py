"""What runs in the engine's own interpreter, as the top-level package `inside`.

It imports nothing of draftquant. The engines' insides are touched in `in_vllm` and `in_sglang` only.
"""
