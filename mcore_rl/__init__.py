"""Reinforcement-learning post-training of mixture-of-experts models with Megatron and SGLang."""

__version__: str


def __getattr__(name: str) -> str:
    """Return `__version__`, which is looked up when it is asked for: that takes 20 ms."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("mcore_rl")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "0+unknown"
