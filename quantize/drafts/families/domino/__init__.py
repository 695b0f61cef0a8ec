"""Domino, built on DFlash."""
