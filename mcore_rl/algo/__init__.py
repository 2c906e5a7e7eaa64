"""Algorithms as pure tensor functions: rewards and log-probs in, advantages and per-token losses
out.
"""
