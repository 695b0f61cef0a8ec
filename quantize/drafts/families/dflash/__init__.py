"""DFlash."""
