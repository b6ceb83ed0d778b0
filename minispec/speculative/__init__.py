"""Guessing ahead: drafters propose tokens that one forward of the target then judges."""
