"""Low-rank adaptation (LoRA) of a model in training, box by box of its HuggingFace tensors."""
