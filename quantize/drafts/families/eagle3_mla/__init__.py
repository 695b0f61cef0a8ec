"""EAGLE-3 with multi-head latent attention (MLA)."""
