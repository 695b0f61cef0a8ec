"""The known versions of engines: the modules of `versions`, found there by (name, version)."""

import importlib
import pkgutil
import re
from collections.abc import Mapping
from types import ModuleType

from . import versions
from .contract import ENGINE_NAMES, EngineName
from .engine import Engine

Key = tuple[EngineName, str]


def discover(package: ModuleType) -> Mapping[Key, Engine]:
    """The `ENGINE` of every module of a package, by name and version; older versions first.

    Raises:
        ValueError: two modules are of the same version of an engine.
    """
    found: dict[Key, Engine] = {}
    for module in pkgutil.iter_modules(package.__path__):
        name = f"{package.__name__}.{module.name}"
        engine: Engine = importlib.import_module(name).ENGINE
        key = (engine.name, engine.version)
        if key in found:
            raise ValueError(f"{name}: {' '.join(key)} is there already")
        found[key] = engine
    return {key: found[key] for key in sorted(found, key=_age)}


def _age(key: Key) -> tuple[int, list[int], str]:
    """Numbers in a version count as numbers: 0.9 is older than 0.33."""
    name, version = key
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    return ENGINE_NAMES.index(name), numbers, version


ENGINES: Mapping[Key, Engine] = discover(versions)


def known_versions(name: EngineName) -> tuple[Engine, ...]:
    """Those of one engine, the newest last."""
    return tuple(engine for engine in ENGINES.values() if engine.name == name)


def choose(name: EngineName, version: str | None = None) -> Engine:
    """One version of an engine; the newest for None, and for one that is not known."""
    return ENGINES.get((name, version or ""), known_versions(name)[-1])


def newest_engines() -> tuple[Engine, ...]:
    """The newest known version of every engine."""
    return tuple(choose(name) for name in ENGINE_NAMES)
