"""What an engine is given of folders: tensors and JSON, and nothing that could be run."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...recipes.regular_file import entries, read_text
from ...recipes.strict_json import JsonProblem, parse_json
from ..files.checkpoint import PICKLES

_NAMES_CODE = "auto_map"  # classes in Python files of the folder, or of any repository of the Hub
_HOLDS_CODE = (".py", ".so", ".pkl", ".pickle", *PICKLES)


def without_code(value: Any) -> Any:
    """JSON without the keys that name code, at any depth; a null names none, and is left to see."""
    if isinstance(value, list):
        return [without_code(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: without_code(each) for key, each in value.items() if key != _NAMES_CODE or each is None
    }


def write_given(folder: Path, given: Path) -> tuple[str, ...]:
    """Make the folder `given` with the draft, tensors by links; returns what of it is code."""
    given.mkdir()
    left_out = [each.file for each in entries(folder) if each.file.endswith(_HOLDS_CODE)]
    for path in folder.glob("*.safetensors"):
        (given / path.name).symlink_to(path.absolute())
    for path in sorted(folder.glob("*.json")):
        with suppress(OSError, JsonProblem):  # what cannot be read, nobody knows to be harmless
            said = parse_json(read_text(path))
            kept = without_code(said)
            if kept != said:
                left_out.append(f"{_NAMES_CODE} of {path.name}")
            (given / path.name).write_text(json.dumps(kept), encoding="utf-8")
    return tuple(left_out)
