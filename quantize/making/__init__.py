"""Making an output folder: what must hold, writing, verifying, publishing."""
