"""One module per draft family: its names, geometry, maths, lints, and what engines know of it.

Its `FAMILY` registers it. Importing a family does not import torch; the maths do when they run.
"""

import importlib
import pkgutil

from ..family import Family


def discover() -> tuple[Family, ...]:
    """The `FAMILY` of every module, by the module's name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(importlib.import_module(f"{__name__}.{name}").FAMILY for name in names)


FAMILIES: tuple[Family, ...] = discover()
