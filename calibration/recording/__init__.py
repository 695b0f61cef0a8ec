"""Recording traces: settings of decoding, and a transformers target that continues prompts."""
