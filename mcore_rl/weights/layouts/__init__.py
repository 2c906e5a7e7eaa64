"""Says which rank holds which box of which HF tensor.

Megatron's and SGLang's layouts follow rules; a traced layout lists its shards.
"""
