"""Reinforcement-learning post-training of mixture-of-experts models with Megatron and SGLang."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("mcore_rl")
except PackageNotFoundError:  # run from a checkout that was not installed
    __version__ = "0+unknown"
