"""Strict decoding, and the words of errors, briefs and files: what comes of every kind of value."""

import json

import documents


def test_what_comes_of_every_kind_of_value() -> None:
    """A part that differs: `python tests/documents.py` writes them anew."""
    kept = json.loads(documents.FILE.read_text(encoding="utf-8"))
    for name, found in documents.parts():
        assert found == kept.pop(name), name
    assert not kept
