"""Classes for reward models whose score SGLang computes otherwise than transformers.

SGLang loads them in place of its own (see rollout.server).
"""
