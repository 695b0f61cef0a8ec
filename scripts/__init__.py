"""The command line of draftquant and the benchmarks; `training`, `real_shapes`: checkout only."""
