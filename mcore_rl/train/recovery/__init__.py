"""Keeps the state of a training rank in memory that survives the rank."""
