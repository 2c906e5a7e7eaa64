"""Ports that have to be free, one of them occupied."""

import os
import socket
from pathlib import Path

from mcore_rl.process.network import find_free_port
from mcore_rl.tools.doctor.machine.needs import MachineNeeds, check_ports
from tests.support.machine_doctor import run_doctor


def test_an_occupied_port_is_named_with_who_listens() -> None:
    free = find_free_port("0.0.0.0")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        taken = server.getsockname()[1]
        run = run_doctor("--only", "ports", "--ports", f"{free},{taken}")
    [finding] = run.outcome("ports")
    assert run.status == 1
    assert (finding.outcome, finding.figures) == ("failed", {"port": taken})
    assert finding.text.startswith(f"{taken} is taken by ")
    assert f"process {os.getpid()}" in finding.text


def test_free_ports_are_ok_below_those_of_outgoing_connections() -> None:
    free = find_free_port("0.0.0.0")
    [finding] = check_ports(MachineNeeds(ports=(free,)))
    assert (finding.outcome, finding.text) == ("ok", f"{free} free")
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    with socket.socket() as probe:
        probe.bind(("", 0))
        inside = probe.getsockname()[1]
    assert int(low) <= inside <= int(high)
    [finding] = check_ports(MachineNeeds(ports=(inside,)))
    assert finding.outcome == "warning"
    assert finding.remedy == f"choose a port below {low}"


def test_no_port_is_tried_unless_one_is_given() -> None:
    assert check_ports(MachineNeeds()) == []
