"""Algorithms as pure functions: rewards and log-probs in, advantages and token losses out."""
