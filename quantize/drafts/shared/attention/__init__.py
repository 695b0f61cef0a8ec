"""Grouped-query attention and multi-head latent attention (MLA)."""
