"""The MTP layer of GLM-4.5, 4.6 and 4.7."""
