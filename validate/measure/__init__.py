"""What servers accept, write and take time for, asked request by request and kept as it came."""
