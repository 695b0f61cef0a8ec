"""Hidden states that trainers dumped: one module a layout, and one that makes traces.

A layout's module gives `Sample`s: tokens, what the dump calls answers, aux features, last hidden
state. Which layers they are, whether the norm was applied and which token a row belongs to is not
believed but settled: `head`, `recomputed` and `draft_steps` hold the evidence.
"""
