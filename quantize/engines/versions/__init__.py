"""One module per version of an engine: its `ENGINE`, in the words of `engine.py`.

A version that does what another does, but for a few things, is that one with these replaced:

    ENGINE = replace(
        vllm_0_33_0.ENGINE,
        version="0.34.0",
        evidence="...",
        declaration=replace(vllm_0_33_0.ENGINE.declaration, methods=...),
    )

Rules stand in the engine's folder, and what they ask of a family in its `engine_traits`: both are
those of the oldest version here. Where a later one has another rule, its module names that one
instead; where it treats a family in another way, its `own` gives the traits with that replaced.
"""
