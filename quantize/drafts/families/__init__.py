"""One module per draft family; each ends in `FAMILY`, which is all that makes it known."""
