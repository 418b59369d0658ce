"""Calls of functions in a model's text: which form they have, how to read and how to force them."""
