"""One module per version of an engine, with its `ENGINE` as `engine.py` defines it.

A version that differs from another in a few rules is the other one with these replaced:

    ENGINE = replace(
        vllm_0_33_0.ENGINE,
        version="0.34.0",
        evidence="...",
        declaration=replace(vllm_0_33_0.ENGINE.declaration, methods=...),
    )

Rules are in the engine's folder. The facts of a family that they need are in its `engine_traits`.
Both describe the oldest version here. If a later version has another rule, its module names that
rule instead. If it treats a family differently, its `own` gives the traits with that fact replaced.
"""
