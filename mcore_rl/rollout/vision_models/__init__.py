"""Classes for vision-language models that SGLang computes otherwise than their authors.

SGLang loads them in place of its own (see rollout.server).
"""
