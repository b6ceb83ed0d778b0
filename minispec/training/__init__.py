"""Making an MTP head for a model that came without one: data, targets, training, a file that ships.

Knows: how its parts follow each other (`minispec.training.__main__`). Does not know: serving.
Taught in notebook 14 (how the head was made).
"""
