"""Which models hand a draft the hidden states of their layers: the rows of targets.toml."""

import functools
import tomllib
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("targets.toml")


def refuses_target(engine: str, version: str, method: str, name: str | None) -> str | None:
    """The error with which an engine refuses a target that hands out no hidden states.

    Args:
        engine: "vllm", "sglang" or another one.
        method: as which the draft is served, in small letters.
        name: the target's, in architectures of its config.json.

    Returns:
        "" where it hands them out, or need not; None where that is not known.
    """
    table = _table()
    errors = table["errors"].get(engine, {method: ""})
    if method not in errors:
        return ""  # nothing is asked of the target
    for row in table["row"]:
        if (row["engine"], row["version"]) == (engine, version) and name in row["classes"]:
            if method in row.get("serves", ()):
                return ""
            if method in row.get("refuses", ()):
                return str(errors[method]).format(name)
    return None


@functools.cache
def _table() -> dict[str, Any]:
    table = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    rows = [{**row, "classes": frozenset(row["classes"].split())} for row in table["row"]]
    return {**table, "row": rows}
