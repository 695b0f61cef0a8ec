"""Quantizing drafts: families, plan, numerics, backends, layouts, writing and verification."""
