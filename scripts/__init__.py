"""The public functions and the command line of draftquant; developers' tools in a clone only."""
