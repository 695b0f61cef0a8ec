"""Recording traces: how text is continued, and a transformers target that continues it."""
