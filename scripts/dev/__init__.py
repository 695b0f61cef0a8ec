"""Developers' tools in a clone: the demo, training, docs, published shapes. Not in the wheel."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Root of the checkout."""
PAIRS = ROOT / "tests" / "pairs"
"""The trained pairs that ship with it."""
