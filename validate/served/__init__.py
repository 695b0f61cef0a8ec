"""What servers accepted, judged: two measurements beside each other, and beside replay."""
