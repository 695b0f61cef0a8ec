"""One module per version of an engine: its `ENGINE`, in the words of `contract.py`.

A version that does what another does, but for a few things, is that one with these replaced:

    ENGINE = replace(vllm_0_33_0.ENGINE, version="0.34.0", evidence="...", methods=...)
"""
