"""The MTP layer of Qwen3-Next and Qwen3.5."""
