"""Which rank holds which box of which HF tensor: by rule (Megatron, SGLang) or by list (traced)."""
