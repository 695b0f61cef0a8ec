"""Developers' tools in a clone: benchmarks, simulations, training, docs. Not in the wheel."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Of the checkout."""
PAIRS = ROOT / "tests" / "pairs"
"""The trained pairs that are shipped with it."""
REAL_SHAPES = f"{__name__}.real_shapes"
"""Writes a draft of a published shape: `python -m`."""
