"""EAGLE-3 with any kind of attention."""
