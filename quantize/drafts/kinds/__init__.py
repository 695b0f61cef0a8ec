"""Kinds of drafts: what each computes, and its forward passes along recorded tokens."""
