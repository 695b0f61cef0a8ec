"""The MTP modules of Step-3.5."""
