"""EAGLE-1, EAGLE-2 and HASS."""
