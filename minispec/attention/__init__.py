"""Attention backends: one formula, from the textbook form to the fast ones."""
