"""How each engine is asked, and how its answers are read."""
