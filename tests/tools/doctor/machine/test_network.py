"""The interface of the collectives, chosen by name as NCCL and gloo do."""

import socket

import pytest

from mcore_rl.tools.doctor.machine.facts import (
    VARIABLES,
    Interface,
    check_hostname,
    check_interface,
    choose_interface,
    find_own_address,
    list_interfaces,
)
from mcore_rl.tools.doctor.machine.needs import MachineNeeds
from tests.support.machine_doctor import reachable_interface, run_doctor

FACES = {
    name: Interface(name, True, (address,), 1000, 1500)
    for name, address in (("lo", "127.0.0.1"), ("docker0", "172.17.0.1"), ("eth0", "10.0.0.1"))
} | {"ib0": Interface("ib0", False, (), 0, 4092)}


def test_an_interface_that_does_not_exist_is_named() -> None:
    run = run_doctor("--only", "interface", "--interface", "nope0")
    [finding] = run.outcome("interface")
    assert run.status == 1
    assert finding.outcome == "failed"
    assert finding.text.startswith("--interface=nope0: no such interface; there are ")
    assert all(name in finding.text for name in list_interfaces())


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_that_names_no_interface_is_named(variable: str, monkeypatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "nope")
    [finding] = check_interface(MachineNeeds())
    assert finding.outcome == "failed"
    assert finding.text.startswith(f"{variable}=nope: no such interface; there are ")


def test_loopback_serves_one_node_but_not_several() -> None:
    assert check_interface(MachineNeeds(interface="lo"))[0].outcome == "ok"
    [finding] = check_interface(MachineNeeds(interface="lo", num_nodes=2))
    assert finding.outcome == "failed"
    assert "other nodes do not reach it" in finding.text


def test_two_names_for_one_network_are_a_warning(monkeypatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    [finding] = check_interface(MachineNeeds())
    assert finding.outcome == "warning"
    assert "NCCL_SOCKET_IFNAME=lo and GLOO_SOCKET_IFNAME=lo,eth0" in finding.text


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"NCCL_SOCKET_IFNAME": "eth"}, "eth0"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, None),
        ({"NCCL_SOCKET_IFNAME": "=eth0,lo"}, "eth0"),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, "eth0"),
        ({"NCCL_SOCKET_IFNAME": "ib"}, "ib0"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, None),
        ({"GLOO_SOCKET_IFNAME": "docker0"}, "docker0"),
        ({"NCCL_SOCKET_IFNAME": "docker", "GLOO_SOCKET_IFNAME": "eth0"}, "docker0"),
    ],
)
def test_names_are_read_as_nccl_and_gloo_do(environ: dict[str, str], name: str | None) -> None:
    face, _ = choose_interface(MachineNeeds(), environ, FACES)
    assert (face.name if face else None) == name
    face, source = choose_interface(MachineNeeds(interface="lo"), environ, FACES)
    assert (face and face.name, source) == ("lo", "--interface=lo")


def test_by_default_the_route_to_other_networks_decides() -> None:
    name = reachable_interface()
    face, source = choose_interface(MachineNeeds(), {}, list_interfaces())
    assert face and (face.name, source) == (name, "the default route")
    assert find_own_address() in face.addresses and face.is_up and not face.is_local


def test_a_hostname_that_leads_to_loopback_is_a_warning_between_nodes() -> None:
    [finding] = check_hostname(MachineNeeds(num_nodes=2))
    name = socket.gethostname()
    assert finding.text.startswith(name)
    try:
        is_loop = socket.gethostbyname(name).startswith("127.")
    except socket.gaierror:
        is_loop = True
    assert (finding.outcome == "warning") == is_loop
