"""Reinforcement-learning post-training of mixture-of-experts models with Megatron and SGLang.

The Python API is mcore_rl.api.
"""

__version__ = "0.2.0"
