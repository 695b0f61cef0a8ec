"""DFlash2, built on DFlash."""
