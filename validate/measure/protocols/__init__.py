"""How each engine is queried, and how its answers are read."""

import importlib

from ..measurement import EngineName
from .protocol import EngineProtocol

_CLASSES: dict[EngineName, tuple[str, str]] = {
    "vllm": ("vllm", "VLLMProtocol"),
    "sglang": ("sglang", "SGLangProtocol"),
    "tensorrt-llm": ("tensorrt_llm", "TensorRTLLMProtocol"),
}
"""Engine -> module beside this one, and its class, which is constructed without arguments."""


def get_protocol(engine: EngineName) -> EngineProtocol:
    """The interface of an engine, for one server."""
    module, name = _CLASSES[engine]
    protocol: EngineProtocol = getattr(importlib.import_module(f".{module}", __name__), name)()
    return protocol
