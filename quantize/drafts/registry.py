"""Which families there are."""

import importlib
import pkgutil
from types import ModuleType

from . import families
from .family import Family


def discover(package: ModuleType) -> tuple[Family, ...]:
    """The `FAMILY` of `names` in every folder of a package, by the name of the folder."""
    modules = (
        importlib.import_module(f"{package.__name__}.{folder.name}.names")
        for folder in pkgutil.iter_modules(package.__path__)
    )
    return tuple(module.FAMILY for module in modules)


FAMILIES: tuple[Family, ...] = discover(families)
