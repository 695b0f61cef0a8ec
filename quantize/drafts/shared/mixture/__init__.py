"""A mixture of experts in place of an MLP."""
