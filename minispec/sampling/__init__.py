"""From logits to tokens: random numbers, the target distribution, and the accept or reject decision."""
