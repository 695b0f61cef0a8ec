"""Quantize draft models of speculative decoding, verify every byte, gate on acceptance.

    import draftquant

    draftquant.quantize("DRAFT", "fp8-ptpc", "OUT")
    assert draftquant.verify("OUT", against="DRAFT").ok
    print(draftquant.gate("DRAFT", "OUT", "TRACES").verdict)

Each function is what the command of its name runs, and returns what that prints. Nothing is
imported before it is asked for.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inspect import Signature

    from .recipes.errors import DraftQuantError, DraftQuantWarning
    from .scripts.api.card import card
    from .scripts.api.check import check
    from .scripts.api.gate import gate
    from .scripts.api.push import push
    from .scripts.api.quantize import quantize
    from .scripts.api.record import record
    from .scripts.api.replay import replay
    from .scripts.api.verify import verify
    from .scripts.api.watch import Watch

    __version__: str

__all__ = [
    "DraftQuantError",
    "DraftQuantWarning",
    "Watch",
    "__version__",
    "card",
    "check",
    "gate",
    "push",
    "quantize",
    "record",
    "replay",
    "verify",
]

_FUNCTIONS = ("card", "check", "gate", "push", "record", "replay", "verify")
_HOMES = {
    "DraftQuantError": ".recipes.errors",
    "DraftQuantWarning": ".recipes.errors",
    "Watch": ".scripts.api.watch",
    **{name: f".scripts.api.{name}" for name in _FUNCTIONS},
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module(".quantize.files.provenance", __name__).package_version(
            __name__
        )
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOMES[name], __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _CallablePackage(ModuleType):
    """The package `draftquant.quantize`, which may be called: the function has its name.

    Importing a submodule binds it as an attribute here, so that a function beside it would be lost
    as soon as somebody imports `draftquant.quantize.plan`.
    """

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._function(*arguments, **options)

    @property
    def _function(self) -> Any:
        return importlib.import_module(".scripts.api.quantize", __package__).quantize

    @property
    def __signature__(self) -> "Signature":
        from inspect import signature  # 10 ms, which `draftquant --help` does without

        return signature(self._function)


importlib.import_module(".quantize", __name__).__class__ = _CallablePackage
