"""Checks that ports are free, and names who listens where they are not."""

from pathlib import Path

import psutil

from mcore_rl.process.ports import is_free
from mcore_rl.tools.doctor.machine.finding import Finding, failed, ok, warning
from mcore_rl.tools.doctor.machine.needs import MachineNeeds

RAY_HEAD_PORTS = (6379, 8265, 10001, 52365)
"""Ports that `ray start --head` takes by default: control service, dashboard, client, agent."""


def check_ports(needs: MachineNeeds) -> list[Finding]:
    """Whether each port can be bound on all interfaces, and no outgoing connection may take it."""
    found = []
    for port in needs.ports:
        if not is_free("0.0.0.0", port):
            remedy = "end that process, or choose another port"
            if port in RAY_HEAD_PORTS:
                remedy = "`ray stop` if it is an old Ray, or `ray start --head --port <other>`"
            found.append(failed("ports", f"{port} is taken{_holder(port)}", remedy, port=port))
    if found or not needs.ports:
        return found
    low, high = _outgoing()
    inside = [port for port in needs.ports if low <= port <= high and port not in RAY_HEAD_PORTS]
    if inside:
        text = f"{inside[0]} is free, but outgoing connections take ports from {low} to {high}"
        return [warning("ports", text, f"choose a port below {low}", port=inside[0])]
    return [ok("ports", f"{', '.join(map(str, needs.ports))} free")]


def _outgoing() -> tuple[int, int]:
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return int(low), int(high)


def _holder(port: int) -> str:
    """Who listens, as far as this user may see it."""
    for connection in psutil.net_connections(kind="inet"):
        is_there = connection.laddr and connection.laddr.port == port
        if is_there and connection.pid and connection.status == psutil.CONN_LISTEN:
            try:
                name = psutil.Process(connection.pid).name()
            except psutil.NoSuchProcess:
                continue
            return f" by {name}, process {connection.pid}"
    return ""
