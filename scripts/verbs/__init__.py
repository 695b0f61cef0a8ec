"""One module per command. Each has `add_arguments` and `run`; importing one imports no torch."""
