"""Attention to the keys that an indexer chooses (DeepSeek-V3.2, GLM-5), on megatron-core's."""
