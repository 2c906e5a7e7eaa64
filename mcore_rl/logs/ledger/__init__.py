"""Keeps the books of a run: what became of each prompt and sample, and whether they balance."""
