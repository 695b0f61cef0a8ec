"""One folder per draft family: `names`, and `geometry`, `forward`, `lints` if it has its own.

`engine_traits` lists what engines do differently with drafts of this family.

`names.FAMILY` registers a family. Importing `names` or `geometry` imports no torch.
"""

import importlib
import pkgutil

from ..family import Family


def discover() -> tuple[Family, ...]:
    """The `FAMILY` of every folder, by name."""
    folders = sorted(folder.name for folder in pkgutil.iter_modules(__path__))
    modules = (importlib.import_module(f"{__name__}.{folder}.names") for folder in folders)
    return tuple(module.FAMILY for module in modules)


FAMILIES: tuple[Family, ...] = discover()
