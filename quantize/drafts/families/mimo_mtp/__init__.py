"""The MTP layer of MiMo."""
