"""The MTP layer of DeepSeek-V3."""
