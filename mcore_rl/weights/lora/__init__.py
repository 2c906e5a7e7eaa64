"""Low-rank adapters (LoRA) of HuggingFace models: their targets, their facts and their files."""
