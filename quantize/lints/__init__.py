"""Lints: config keys that trainers and engines interpret differently in a well-formed draft."""
