"""Tells Ray on one machine of GPUs that do not exist."""

from collections.abc import Iterator
from contextlib import contextmanager

import ray


@contextmanager
def four_imaginary_gpus() -> Iterator[None]:
    """Run Ray with eight cores and four GPUs, which it assigns like real ones."""
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=4,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
    )
    try:
        yield
    finally:
        ray.shutdown()
