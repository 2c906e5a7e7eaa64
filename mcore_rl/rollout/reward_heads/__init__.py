"""Reward models whose score SGLang computes otherwise than transformers; it loads these classes instead."""
