"""The models: configuration, arithmetic, and how weights and tokenizers get in."""
