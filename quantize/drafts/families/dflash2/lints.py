"""DFlash2: what overflows, and what SGLang does not read."""

from collections.abc import Iterator

from ...exporters import layer_config
from ...family import Draft, Lint
from ..dflash import lints as dflash
from .geometry import DFlash2Geometry


def float16(draft: Draft) -> Iterator[Lint]:
    """Source: vLLM issue 55250 (0 of 1,100 tokens accepted), dflash-mlx issue 60."""
    config = layer_config(draft)
    declared = "float16" in (config.get("dtype"), config.get("torch_dtype"))
    stored = any(row.tensor.dtype == "F16" for row in draft.rows)
    if declared or stored:
        yield Lint(
            name="dflash2-float16",
            level="warning",
            cause="DFlash2 overflows in float16: vLLM accepted none of 1,100 tokens in this"
            " dtype. Replay computes in float32, so it does not show the loss",
            remedy="store and serve the draft in bfloat16, or measure what is served",
        )


def embedding_scale(draft: Draft) -> Iterator[Lint]:
    """Source: vLLM 0.33 `qwen3_dflash2.py:377`; SGLang 0.5.23 asks the target instead."""
    geometry = draft.geometry
    if isinstance(geometry, DFlash2Geometry) and geometry.input_embedding_scale != 1:
        yield Lint(
            name="dflash2-embedding-scale",
            level="warning",
            cause=f"input_embedding_scale is {geometry.input_embedding_scale:g}: vLLM 0.33 and"
            " replay multiply the embeddings by it, but SGLang 0.5.23 does not read it",
            remedy="serve this draft with vLLM, or measure its acceptance on SGLang",
        )


LINTS = (*dflash.LINTS, float16, embedding_scale)
