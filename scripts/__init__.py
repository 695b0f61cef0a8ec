"""The command line of draftquant, the trainer of the shipped pairs, and the benchmarks."""
