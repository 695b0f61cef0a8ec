"""Codes that are there already, written in another layout or carrier."""
