"""Reinforcement-learning post-training of mixture-of-experts models with Megatron and SGLang."""

__version__ = "0.2.0"
