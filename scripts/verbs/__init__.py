"""One module per command: settings, function, and how it is shown; imports no torch."""
