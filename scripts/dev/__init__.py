"""Developers' tools in a clone: the demo, training, docs, published shapes. Not in the wheel."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Of the checkout."""
PAIRS = ROOT / "tests" / "pairs"
"""The trained pairs that are shipped with it."""
