"""Quantizing drafts: families, plan, numerics, backends, layouts, writer and verification."""
