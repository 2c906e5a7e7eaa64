"""Megatron actors: process groups, model, optimizer step, checkpoints, export."""
