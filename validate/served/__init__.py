"""Judging what servers accepted: two measurements compared with each other, and with replay."""
