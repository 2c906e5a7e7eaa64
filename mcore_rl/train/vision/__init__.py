"""Vision towers in Megatron: images become embeddings at the places of their placeholder tokens."""
