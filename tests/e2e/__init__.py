"""Whole runs through the command line: Megatron ranks, SGLang and Ray as a user starts them."""
