"""What engines say alike of names that no draft as it is served has."""

from collections.abc import Mapping
from typing import Any

from .contract import Finding

NO_TYPE = (
    "The checkpoint you are trying to load has model type `dflash` but Transformers does not"
    " recognize this architecture."
)


def strip_root(root: str) -> str:
    """The remedy for tensors named ROOT.X."""
    return f"strip {root!r} from the names of the tensors, as its trainer's export does"


def own_type(config: Mapping[str, Any], text: str) -> Finding | None:
    """TorchSpec's name of its class of config, where an engine looks for one of Transformers."""
    if config.get("model_type") != "dflash":
        return None
    return Finding("config", text.format(NO_TYPE), "set model_type to qwen3")
