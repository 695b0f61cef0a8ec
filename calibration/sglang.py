"""Why."""
WHAT = "x"
FIX = "y"
