"""The reading side: what a folder declares and stores, decoded with nothing of what wrote it."""
