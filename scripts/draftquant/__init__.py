"""Quantize draft models of speculative decoding, verify every byte, gate on acceptance.

    from draftquant import api as dq

    dq.quantize("DRAFT", "fp8-ptpc", "OUT")
    assert dq.verify("OUT", against="DRAFT").ok
    print(dq.gate("DRAFT", "OUT", "TRACES").verdict)

The public module is `draftquant.api`. Nothing is imported before it is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str

__all__ = ["__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module(".recipes.packages", __name__).package_version(__name__)
    what = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(f"{what}; verbs and types are in draftquant.api")
