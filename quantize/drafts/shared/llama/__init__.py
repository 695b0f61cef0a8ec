"""Ordinary Llama layers."""
