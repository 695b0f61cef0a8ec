"""The plugin: INT4 of Quark, unpacked at load, is served as the same codes carried by FP8 are."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cases import FAMILIES
from results import Outcome

INT4, CARRIED = "mi325x-w4a8", "mi325x-w4a8-fp8"


def plugin_faults(ask: Callable[..., list[Outcome]], platforms: Sequence[Any]) -> list[str]:
    """What is not as it should be, a line each.

    Args:
        ask: (names of cases, platform, options of the loader) -> an outcome per case.
        platforms: where to load.
    """
    return [fault for platform in platforms for fault in _faults(ask, platform)]


def _faults(ask: Callable[..., list[Outcome]], platform: Any) -> Iterator[str]:
    names = {recipe: [f"{family}--{recipe}" for family in FAMILIES] for recipe in (INT4, CARRIED)}
    unpacked = ask(names[INT4], platform, "--plugin")
    carried = ask(names[CARRIED], platform)
    for found, expected in zip(unpacked, carried, strict=True):
        where = f"{found['draft']} with the plugin in {platform}"
        if found["verdict"] != expected["verdict"]:
            yield f"{where}: {found['verdict']} {found['error']}, not {expected['verdict']}"
        elif found["served"] != expected["served"]:
            yield f"{where}: other parameters are served than of {expected['draft']}"
