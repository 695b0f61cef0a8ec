"""EAGLE-3 and P-EAGLE with Llama layers."""
