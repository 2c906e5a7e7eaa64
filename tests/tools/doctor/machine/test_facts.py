"""Facts that nodes tell of themselves, and in what they differ."""

from dataclasses import replace

from mcore_rl.tools.doctor.machine.facts import NodeFacts, compare_facts, gather_facts
from mcore_rl.tools.doctor.machine.finding import Finding
from mcore_rl.tools.doctor.machine.meeting import NodePlace
from mcore_rl.tools.doctor.machine.needs import MachineNeeds

A = NodeFacts("a", "host-a", "10.0.0.1", "eth0", {"torch": "2.14.1"}, {"NCCL_DEBUG": "INFO"}, ())
B = replace(A, name="b", host="host-b", address="10.0.0.2")
C = replace(A, name="c", host="host-c", address="10.0.0.3")


def wrong(*facts: NodeFacts) -> list[Finding]:
    return [finding for finding in compare_facts(facts) if finding.outcome != "ok"]


def test_nodes_that_are_alike_are_ok() -> None:
    assert [f.check for f in compare_facts([A, B, C])] == ["same versions", "same environment"]
    assert not wrong(A, B, C)


def test_a_version_that_differs_is_a_failure_that_names_the_nodes() -> None:
    [finding] = wrong(A, B, replace(C, versions={"torch": "2.13.0"}))
    assert finding.outcome == "failed"
    assert finding.text == "torch 2.14.1 on a, b; 2.13.0 on c"
    [finding] = wrong(A, replace(B, versions={}))
    assert finding.text == "torch 2.14.1 on a; not installed on b"


def test_a_driver_that_differs_is_a_warning() -> None:
    [finding] = wrong(
        replace(A, versions={"driver": "580"}), replace(B, versions={"driver": "570"})
    )
    assert (finding.check, finding.outcome) == ("same versions", "warning")


def test_a_variable_that_differs_is_a_warning_and_a_failure_where_all_must_agree() -> None:
    [finding] = wrong(A, B, replace(C, environ={}))
    assert finding.outcome == "warning"
    assert finding.text == "NCCL_DEBUG is unset instead of 'INFO' of a on c"
    [finding] = wrong(A, replace(B, environ={**A.environ, "NCCL_CUMEM_ENABLE": "1"}))
    assert finding.outcome == "failed"
    assert "NCCL_CUMEM_ENABLE" in finding.text


def test_other_gpus_are_a_warning() -> None:
    [finding] = wrong(
        replace(A, gpus=["H200"]), replace(B, gpus=["H100"]), replace(C, gpus=["H200"])
    )
    assert (finding.outcome, finding.text) == ("warning", "H200 on a, c; H100 on b")


def test_two_tasks_on_one_node_are_a_failure() -> None:
    [finding] = wrong(A, B, replace(C, name="a"))
    assert finding.outcome == "failed"
    assert finding.text == "numbers 0, 2 all run on a"
    assert "--ntasks-per-node=1" in finding.remedy


def test_this_node_tells_its_address_versions_and_no_secret(monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    facts = gather_facts(NodePlace(0, 2, "a"), MachineNeeds(interface="lo"))
    assert (facts.name, facts.address, facts.interface) == ("a", "127.0.0.1", "lo")
    assert {"python", "torch", "sglang", "mcore_rl"} <= facts.versions.keys()
    assert facts.environ["NCCL_DEBUG"] == "WARN" and "HF_TOKEN" not in facts.environ
