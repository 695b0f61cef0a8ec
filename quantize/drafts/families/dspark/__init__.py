"""DSpark, built on DFlash."""
