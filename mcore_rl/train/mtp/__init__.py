"""Layers for multi-token prediction that learn beside the policy, without any effect on it."""
