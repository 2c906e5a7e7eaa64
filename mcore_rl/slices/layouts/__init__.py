"""Who holds which box of which HF tensor, by rule (Megatron, SGLang) or by list (what was traced)."""
