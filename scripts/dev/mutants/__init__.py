"""Mutation testing: small changes of the product, and whether an everyday test notices each."""
