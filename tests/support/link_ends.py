"""Ends of a link in this process, one per rank, for tests that run ranks in threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.link_store import LinkStore
from mcore_rl.weight_sync.wire import Link

HOST = torch.device("cpu")
Result = TypeVar("Result")


def make_link(
    num_senders: int = 1, num_receivers: int = 1, timeout_s: float = 20.0, bucket_bytes: int = 700
) -> tuple[LinkStore, Link]:
    """A link and the store it meets at, which lives as long as it is held."""
    store = LinkStore.serve("127.0.0.1", timeout_s)
    link = Link(
        engine="engine-0",
        store_host="127.0.0.1",
        store_port=store.port,
        store_key=store.key,
        num_senders=num_senders,
        num_receivers=num_receivers,
        bucket_bytes=bucket_bytes,
        timeout_s=timeout_s,
    )
    store.keep(link)
    return store, link


def open_ends(link: Link) -> list[LinkEnd]:
    """The end of each rank of `link`, on the host."""
    return [LinkEnd.open(link, rank, HOST) for rank in range(len(link.names))]


def run_ranks(acts: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run the acts of all ranks at once; their results in order. The first error is raised."""
    with ThreadPoolExecutor(len(acts)) as pool:
        futures = [pool.submit(act) for act in acts]
        return [future.result() for future in futures]
