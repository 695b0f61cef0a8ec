"""The public functions and the command line of draftquant; developers' tools only in a clone."""
