"""The declaration of a folder of ours, key by key: a key that is missing is read as its default."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ...recipes.schema import Recipe
from ..drafts import Draft
from ..files.checkpoint import CONFIG_FILE, Checkpoint, read_json_object
from ..stored.declarations import DeclaredScheme
from .method import own_formats
from .verify_report import Fault

_DECLARATION = "quantization_config"


def complete_faults(
    recipe: Recipe, scheme: DeclaredScheme, draft: Draft, output: Checkpoint
) -> list[Fault]:
    """config.json, and the layout's own file, declare just what this package writes for a recipe.

    Which modules are excluded is judged by what the excludes match, see `exclude_faults`.
    """
    layout = scheme.layout
    own = recipe.in_format(recipe.formats[0]).stored
    others = own_formats(recipe, draft, named_heads=layout.names_heads)
    wanted = layout.complete(own, list(scheme.excludes), others)
    found = output.config.get(_DECLARATION)
    faults = list(_differences(f"{CONFIG_FILE}: {_DECLARATION}", wanted, found))
    if layout.side_file and (output.folder / layout.side_file.name).is_file():
        name = layout.side_file.name
        content = read_json_object(output.folder / name, "quantize the draft again")
        faults += _differences(name, layout.side_file.complete(wanted), content)
    return faults


def _differences(where: str, wanted: object, found: object) -> Iterator[Fault]:
    """Every innermost key with another value, as JSON tells values apart."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in sorted(wanted.keys() | found.keys()):
            inner = f"{where}.{key}" if where.count(":") else f"{where}: {key}"
            if key in wanted and key in found:
                yield from _differences(inner, wanted[key], found[key])
            else:
                yield Fault(where=inner, expected=_text(wanted, key), got=_text(found, key))
    elif json.dumps(wanted, sort_keys=True) != json.dumps(found, sort_keys=True):
        yield Fault(where=where, expected=json.dumps(wanted), got=json.dumps(found))


def _text(mapping: Mapping[str, Any], key: str) -> str:
    return json.dumps(mapping[key]) if key in mapping else "no such key"
