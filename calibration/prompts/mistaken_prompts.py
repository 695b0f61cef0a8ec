"""What a file is that was given as prompts and is none: the kind of mistake, and the way out."""

import codecs
import difflib
import shlex
from pathlib import Path

from ..traces.manifest import MANIFEST_FILE

EXAMPLE = '{"id": "1", "category": "chat", "text": "Hello"}'
FORM = f"one prompt per line: {EXAMPLE}"
_PACKED = {
    b"\x1f\x8b": ("gzip", "gunzip -k"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -d"),
    b"BZh": ("bzip2", "bunzip2 -k"),
    b"\xfd7zX": ("xz", "unxz -k"),
    b"PK\x03\x04": ("zip", "unzip"),
}
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def mistaken_bytes(path: Path, start: bytes) -> tuple[str, str] | None:
    """What is wrong with a file that begins with these bytes, and the fix; None = nothing."""
    name = shlex.quote(str(path))
    for magic, (kind, unpack) in _PACKED.items():
        if start.startswith(magic):
            return f"it is compressed by {kind}", f"unpack it: {unpack} {name}"
    if start.startswith(_UTF16):
        convert = f"iconv -f UTF-16 -t UTF-8 {name} > NEW.jsonl"
        return "it is UTF-16, not UTF-8", f"convert it: {convert}"
    if start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        write = f"jq -c '.[]' {name} > NEW.jsonl"
        return "it is one JSON list, not JSON lines", f"write one prompt per line: {write}"
    return None


def mistaken_lines(path: Path, first: str) -> str:
    """How to mend a file of which some lines are no prompts.
    """
    name = shlex.quote(str(path))
    if first.strip() == "{":
        return f"write each prompt on one line: jq -c . {name} > NEW.jsonl"
    if path.suffix in (".json", ".csv", ".txt", ".tsv"):
        return f"write JSON lines instead of {path.suffix}: {FORM}"
    return f"write {FORM}; 'draftquant record --help' names the other forms"


def missing_file(path: Path) -> str:
    """What to do about a file that cannot be read."""
    if (path / MANIFEST_FILE).is_file():
        return f"give a file with {FORM}; `record --continue` goes on behind texts of traces"
    beside = (
        path.parent.glob(f"*{path.suffix}") if path.parent.is_dir() and not path.exists() else ()
    )
    close = difflib.get_close_matches(path.stem, sorted(one.stem for one in beside), n=1)
    near = path.parent / f"{close[0]}{path.suffix}" if close else None
    return f"did you mean {near}?" if near else f"give a file with {FORM}"
