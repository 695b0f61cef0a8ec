"""Generators of docs/reference and docs/pictures, from code and measured figures."""
