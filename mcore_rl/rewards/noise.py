"""Derives a pseudo-random number from each sample, which rehearsals add to its reward.

A random model earns the same reward for each of its responses. Advantages and gradients would then
be zero, and a rehearsed step would move no weights.
"""

import hashlib

from mcore_rl.types import Sample


def noise_of(sample: Sample, part: str) -> float:
    """Return a number in [0, 1) that depends only on prompt, response tokens and `part`."""
    tokens = (sample.prompt.token_ids, sample.response_ids)
    digest = hashlib.blake2b(f"{part} {tokens}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)
