"""What a target did on prompts: the trace format, its files, and the evidence that they hold."""
