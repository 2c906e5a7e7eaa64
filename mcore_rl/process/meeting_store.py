"""Makes the TCPStore at which the ranks of a process group meet, on one interface only.

torch lets a store listen on all interfaces, whatever address it is given, and it asks nobody for a
key: who reaches it can read and write its values.
"""

import socket
from datetime import timedelta
from importlib import import_module
from typing import Any


def make_meeting_store(
    host: str, port: int, rank: int, world_size: int, timeout: timedelta, **options: Any
) -> Any:
    """Return the store's client; on rank 0 also serve it, at `host`:`port` and nowhere else.

    `host` must be an address of rank 0's machine, as all ranks reach it. Waits until all ranks are
    there, for up to `timeout`.
    """
    from torch import distributed

    store: Any = distributed.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    is_server = rank == 0
    if is_server:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=max(128, world_size))
        options["master_listen_fd"] = listener.detach()
    return store(host, port, world_size, is_server, timeout, multi_tenant=True, **options)


def bind_meetings_to_their_host() -> None:
    """Have torch's `tcp://host:port` rendezvous listen at `host` only, in this process.

    For processes whose groups another library makes.
    """
    # torch.distributed has a function of the same name.
    rendezvous: Any = import_module("torch.distributed.rendezvous")

    torchs_own = rendezvous._create_c10d_store

    def create(
        hostname: str,
        port: int,
        rank: int,
        world_size: int,
        timeout: timedelta,
        use_libuv: bool = True,
    ) -> Any:
        if rendezvous._torchelastic_use_agent_store():
            return torchs_own(hostname, port, rank, world_size, timeout, use_libuv)
        return make_meeting_store(hostname, port, rank, world_size, timeout)

    rendezvous._create_c10d_store = create
