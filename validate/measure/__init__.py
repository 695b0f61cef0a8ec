"""What servers accept, write and take time for: measured request by request, and compared."""
