"""Documents that went wrong: valid JSON, bytes or text, changed in a few places by hypothesis."""

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

Path = tuple[str | int, ...]

WORDS = st.sampled_from(
    ["", "a", "\ud800", "\x1b[31m", "a\nGOOD", "\u202e", "\x9b", "[red]", "é" * 50, "x" * 5000,
     "re:.*", "re:(", "re:(([a-z._0-9])+)+!", "*" * 40, "layers.99999999999999999999.", "../../etc",
     "/dev/zero", "a\0b", "NaN", "1e400", "quark", "BF16", "F8_E4M3", "none", "lm_head.weight"]
)  # fmt: skip
NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 3, 7, 16, 127, 128, 2**31, 2**63, 2**64, 10**39, 10**100, 0.0, -0.0, 0.5, 1e-320,
     1e308, float("inf"), float("-inf"), float("nan"), True, False]
)  # fmt: skip
SCALARS = st.none() | NUMBERS | WORDS | st.text(max_size=5) | st.integers()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
) | st.sampled_from([40, 90, 150, 900]).map(lambda levels: nested(levels))

WAYS = st.sampled_from(["set", "set", "set", "delete", "rename", "add", "swap", "wrap"])


def nested(levels: int) -> list[Any]:
    """[[[...]]]"""
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """Every place of a document."""
    yield at
    if isinstance(value, dict | list) and len(at) < 20:
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from paths(value[key], (*at, key))


@st.composite
def mutated(draw: st.DrawFn, document: Any) -> Any:
    """The document, changed in one to three places."""
    changed = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        places = [place for place in paths(changed) if place]
        if not places or draw(st.integers(0, 30)) == 0:
            return draw(VALUES)
        *outer, key = draw(st.sampled_from(places))
        parent = changed
        for step in outer:
            parent = parent[step]
        how = draw(WAYS)
        if how == "delete":
            del parent[key]
        elif how == "rename" and isinstance(parent, dict):
            parent[draw(WORDS)] = parent.pop(key)
        elif how == "add" and isinstance(parent, dict):
            parent[draw(WORDS)] = draw(VALUES)
        elif how == "swap":
            parent[key] = copy.deepcopy(at(changed, draw(st.sampled_from(places))))
        elif how == "wrap":
            parent[key] = [parent[key]]
        else:
            parent[key] = draw(VALUES)
    return changed


def at(value: Any, place: Path) -> Any:
    """What stands there; None where nothing does any more."""
    for step in place:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def json_bytes(document: Any) -> bytes:
    """As text of JSON, in ASCII: lone surrogates become escapes."""
    return json.dumps(document).encode()


@st.composite
def scrambled(draw: st.DrawFn, content: bytes) -> bytes:
    """The bytes, changed in one to three places."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(content)))
        stop = min(len(content), start + draw(st.sampled_from([0, 1, 2, 10, 200])))
        piece = draw(
            st.binary(max_size=6)
            | st.sampled_from([b"", content[start:stop] * 2, b"[" * 2000, b"9" * 5000, b"{}", b'"',
                               b"\\ud800", b"\xff", b"\xe2\x80\xae", b"NaN", b"-1e999"])
        )  # fmt: skip
        content = content[:start] + piece + content[stop:]
    return content


def documents(document: Any) -> st.SearchStrategy[bytes]:
    """The document gone wrong as a document or as a text."""
    return mutated(document).map(json_bytes) | scrambled(json.dumps(document, indent=1).encode())
