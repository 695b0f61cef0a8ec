"""Decode a dashboard by Grafana's own model of it, and say what it lost; see `run.py`.

Runs where grafana-foundation-sdk is installed; nothing of draftquant is imported.
"""

import json
import sys
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard


def lost(given: Any, kept: Any, place: str = "") -> list[str]:
    """Keys that the model does not have."""
    if isinstance(given, dict):
        own = kept if isinstance(kept, dict) else {}
        return [
            name
            for key, value in given.items()
            for name in (
                lost(value, own[key], f"{place}.{key}") if key in own else [f"{place}.{key}"]
            )
        ]
    if isinstance(given, list):
        own = kept if isinstance(kept, list) else []
        if len(own) != len(given):
            return [place]
        each = (lost(value, own[i], f"{place}[{i}]") for i, value in enumerate(given))
        return [name for names in each for name in names]
    return []


def main() -> int:
    """Exit status 1 where a key is not Grafana's."""
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    kept = json.loads(json.dumps(Dashboard.from_json(given), cls=JSONEncoder))
    missing = lost(given, kept)
    sys.stdout.write(", ".join(missing) or "no key was lost")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
