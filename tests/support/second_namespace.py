"""A second network namespace beside this one, joined by a cable: another machine, as it were."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

OUR_ADDRESS = "10.231.77.1"
THEIR_ADDRESS = "10.231.77.2"
SCAN = """
import json, socket, sys
host, ports = sys.argv[1], json.loads(sys.argv[2])
open_ports = []
for port in ports:
    with socket.socket() as probe:
        probe.settimeout(2)
        if probe.connect_ex((host, port)) == 0:
            open_ports.append(port)
print(json.dumps(open_ports))
"""


@dataclass(frozen=True)
class Neighbor:
    pid: int

    def open_ports(self, ports: Iterable[int]) -> list[int]:
        """Return those of this machine's ports to which the neighbor connects."""
        inside = ["nsenter", "-t", str(self.pid), "-n"]
        command = [sys.executable, "-c", SCAN, OUR_ADDRESS, json.dumps(list(ports))]
        answer = subprocess.run([*inside, *command], capture_output=True, timeout=120, check=True)
        return json.loads(answer.stdout)


@contextmanager
def neighbor() -> Iterator[Neighbor]:
    """Join a namespace to this one; the test is skipped where that is not permitted."""
    ours, theirs = f"mc{os.getpid()}a", f"mc{os.getpid()}b"
    holder = subprocess.Popen(
        ["unshare", "-n", "sh", "-c", "echo up; exec sleep 600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert holder.stdout is not None
        if holder.stdout.readline() != "up\n":
            pytest.skip("no permission to make a network namespace")
        inside = ["nsenter", "-t", str(holder.pid), "-n"]
        try:
            for command in (
                ["ip", "link", "add", ours, "type", "veth", "peer", "name", theirs],
                ["ip", "link", "set", theirs, "netns", str(holder.pid)],
                ["ip", "address", "add", f"{OUR_ADDRESS}/30", "dev", ours],
                ["ip", "link", "set", ours, "up"],
                [*inside, "ip", "address", "add", f"{THEIR_ADDRESS}/30", "dev", theirs],
                [*inside, "ip", "link", "set", theirs, "up"],
            ):
                subprocess.run(command, capture_output=True, timeout=120, check=True)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no second network namespace: {error}")
        yield Neighbor(holder.pid)
    finally:
        holder.kill()
        holder.wait()
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(["ip", "link", "delete", ours], capture_output=True, timeout=120)
