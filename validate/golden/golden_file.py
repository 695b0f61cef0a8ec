"""Golden acceptance as a file: one JSON object, written whole and read strictly."""

import json
from pathlib import Path

from ...recipes.decode import encode
from ...recipes.errors import reason, short
from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, decode, parse_object
from ..errors import GoldenError
from .golden import FORMAT, Golden

_OURS = "give what --golden of 'replay', 'gate', 'report' or 'measure' wrote, or write it again"


def golden_document(golden: Golden) -> str:
    """The text of a file; every prompt has a line of its own."""
    found = encode(golden)
    prompts = found.pop("prompts")
    head = json.dumps(found, indent=2, allow_nan=False).removesuffix("\n}")
    lines = ",\n".join(f"    {json.dumps(one, allow_nan=False)}" for one in prompts)
    return f'{head},\n  "prompts": [\n{lines}\n  ]\n}}\n'


def read_golden(path: Path) -> Golden:
    """Read a file of golden acceptance.

    Raises:
        GoldenError: it cannot be read, is something else or of another version, or its figures do
            not follow from its counts.
    """
    try:
        found = parse_object(read_text(path))
        if found.get("format") != FORMAT:
            raise GoldenError(
                path,
                f"is no golden acceptance: expected format {FORMAT!r}, got"
                f" {short(found.get('format'))}",
                fix=_OURS,
            )
        golden: Golden = decode(Golden, found)
    except OSError as exc:
        raise GoldenError(path, f"cannot be read: {reason(exc)}", fix=_OURS) from exc
    except JsonProblem as exc:
        raise GoldenError(path, f"is no golden acceptance: {exc}", fix=_OURS) from exc
    return golden
