"""Putting an MTP layer that was quantized apart back into its target's folder."""
