"""A free port is one that a server and its derived ports can bind, outside the ephemeral range."""

import socket
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

from mcore_rl.process import network
from mcore_rl.process.network import find_free_port


@pytest.fixture
def nothing_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports that were found may be found again at once."""
    monkeypatch.setattr(network, "RESERVED_S", -1.0)


def test_a_free_port_can_be_bound_and_is_never_an_outgoing_one() -> None:
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    port = find_free_port("127.0.0.1")
    assert 20000 <= port < int(first)
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))


@pytest.mark.usefixtures("nothing_is_reserved")
@pytest.mark.parametrize("derived", [0, 6, 13, 233, 246])
def test_a_port_is_not_free_if_a_derived_one_is_taken(
    derived: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = other = find_free_port("127.0.0.1")
    while abs(other - port) <= 300:
        other = find_free_port("127.0.0.1")
    monkeypatch.setattr(network.random.SystemRandom, "sample", lambda *_: [port])
    assert find_free_port("127.0.0.1") == port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + derived))
        with pytest.raises(RuntimeError, match="no free port between 20000 and"):
            find_free_port("127.0.0.1")
        monkeypatch.setattr(network.random.SystemRandom, "sample", lambda *_: [port, other])
        assert find_free_port("127.0.0.1") == other


def test_processes_that_look_at_once_never_get_the_same_port_nor_a_derived_one() -> None:
    script = (
        "from mcore_rl.process.network import find_free_port\n"
        "print(*(find_free_port('127.0.0.1') for _ in range(20)), flush=True)\n"
        "input()"
    )
    command = [sys.executable, "-c", script]
    pipe = subprocess.PIPE
    searches = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    found: list[int] = []
    try:
        for search in searches:
            assert search.stdout is not None
            found += map(int, search.stdout.readline().split())
    finally:
        for search in searches:
            search.communicate("\n", timeout=120)
    assert len(found) == 60
    bound = [{port + derived for derived in network._DERIVED_PORTS} for port in found]
    for one, other in combinations(bound, 2):
        assert not one & other


def test_a_port_can_be_found_again_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    port = find_free_port("127.0.0.1")
    monkeypatch.setattr(network.random.SystemRandom, "sample", lambda *_: [port])
    with pytest.raises(RuntimeError, match="no free port"):
        find_free_port("127.0.0.1")
    monkeypatch.setattr(network, "RESERVED_S", -1.0)
    assert find_free_port("127.0.0.1") == port


def test_a_port_can_be_found_again_once_the_process_that_found_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = "from mcore_rl.process.network import find_free_port as f; print(f('127.0.0.1'))"
    port = int(subprocess.check_output([sys.executable, "-c", script]))
    monkeypatch.setattr(network.random.SystemRandom, "sample", lambda *_: [port])
    assert find_free_port("127.0.0.1") == port


def test_a_lack_of_descriptors_is_not_taken_for_a_lack_of_ports() -> None:
    script = (
        "import resource\n"
        "from mcore_rl.process.network import find_free_port\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))\n"
        "find_free_port('127.0.0.1')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1 and "Too many open files" in done.stderr
