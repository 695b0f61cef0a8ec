"""The command line of every `by_TOOL.py`: its schemes on the drafts, one JSON line per folder.

Usage: `PYTHON by_TOOL.py DRAFTS RESULT TURN`, with the folder that `drafts.write_drafts` made.
Tools write what they like on standard output. Another turn puts every scheme on other drafts.
"""

import json
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

Make = Callable[[str, Path, Path, int], object]
"""(scheme, source, out, variant): which of the tool's usual lists of excludes it is given."""
NUM_VARIANTS = 3


def main(tool: str, schemes: Sequence[str], make: Make, *, every: int) -> None:
    """Make the folders of one tool.

    Args:
        tool: name of the tool.
        schemes: by name; each one quantizes every `every`-th draft, other ones in turn.
        make: writes one folder, which does not exist yet.
        every: see `schemes`.
    """
    warnings.simplefilter("ignore")
    turn = int(sys.argv[3])
    drafts = sorted(Path(sys.argv[1]).iterdir())
    pairs = [
        (i, scheme, j, place)
        for i, scheme in enumerate(schemes)
        for j, place in enumerate(drafts)
        if (i + j + turn) % every == 0
    ]
    lines: list[str] = []
    for i, scheme, j, place in pairs:
        name = f"{tool}--{scheme}"
        refused = None
        try:
            make(scheme, place / "draft", place / name, (i + j // every) % NUM_VARIANTS)
        except Exception as exc:  # noqa: BLE001  whatever a tool raises is its answer
            refused = f"{type(exc).__name__}: {' '.join(str(exc).split())[:200]}"
            traceback.print_exception(exc, file=sys.stderr)
            shutil.rmtree(place / name, ignore_errors=True)
        made = {"tool": tool, "scheme": scheme, "draft": place.name, "refused": refused}
        lines.append(json.dumps(made))
    Path(sys.argv[2]).write_text("\n".join(lines) + "\n", encoding="utf-8")
