"""Hidden states that trainers dumped: one module per layout, and one that makes traces of them.

A layout's module gives `Sample`s: tokens, answers as the dump marks them, aux features, and the
last hidden state. Three facts are verified, not taken from the dump: the layers, whether the norm
was applied, and the token of each row. `head`, `recomputed` and `draft_steps` hold the evidence.
"""
