"""EAGLE-3, whatever the attention of its layers."""
