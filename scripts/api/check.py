"""`check`: what an engine will do with a draft folder, before a server is started."""

from typing import TYPE_CHECKING

from .opening import Reference, folder_of

if TYPE_CHECKING:
    from ...quantize.engines import EngineCheck, EngineName


def check(
    draft: Reference,
    engine: "EngineName",
    *,
    version: str | None = None,
    arch: str | None = None,
    tp: int = 1,
    target_layers: int | None = None,
) -> "EngineCheck":
    """Predict what an engine does with a draft, quantized or not; runs no engine, needs no GPU.

    Example:
        >>> answer = draftquant.check("OUT", "vllm", arch="h200")
        >>> answer.verdict, answer.remedy
        ('LOADS', None)

    Args:
        draft: folder or Hub id.
        engine: "vllm", "sglang" or "tensorrt-llm".
        version: of the engine; None = the newest known. One that is not known is UNKNOWN.
        arch: "gfx942", "sm90", "sm100", or as people say it ("mi325x", "h100", "b200"); None = all
            must agree.
        tp: tensor-parallel shards, at least 1.
        target_layers: decoder layers of the target, after which vLLM numbers the draft's.

    Raises:
        CheckpointError: no draft can be read there, or there is no such engine or GPU.
    """
    from ...quantize.engines import check_draft
    from ...quantize.gpus import architecture

    return check_draft(
        folder_of(draft),
        engine=engine,
        version=version,
        arch=architecture(arch) if arch else None,
        tp=tp,
        target_layers=target_layers,
    )
