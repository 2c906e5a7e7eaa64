"""Runs the checks of one machine, each with a deadline, in the order of the report."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from mcore_rl.process.disk import explain_refusal
from mcore_rl.process.errors import describe_error
from mcore_rl.tools.doctor.machine.finding import Finding, fail
from mcore_rl.tools.doctor.machine.needs import MachineNeeds


@dataclass(frozen=True)
class MachineCheck:
    """A check: the module of this folder, and its function, that returns the findings.

    The module is imported when the check runs: a package that is missing fails that check alone.
    """

    name: str
    module: str
    function: str
    deadline_s: float = 20.0

    def find(self, needs: MachineNeeds) -> list[Finding]:
        module = import_module(f"mcore_rl.tools.doctor.machine.{self.module}")
        function: Callable[[MachineNeeds], list[Finding]] = getattr(module, self.function)
        return function(needs)


CHECKS = (
    MachineCheck("python", "versions", "check_python"),
    MachineCheck("packages", "versions", "check_packages", deadline_s=60.0),
    MachineCheck("torch", "versions", "check_torch_build", deadline_s=60.0),
    MachineCheck("gpus", "hardware", "check_gpus", deadline_s=60.0),
    MachineCheck("nodes", "hardware", "check_nodes"),
    MachineCheck("links", "hardware", "check_links"),
    MachineCheck("interface", "facts", "check_interface"),
    MachineCheck("hostname", "facts", "check_hostname"),
    MachineCheck("infiniband", "hardware", "check_infiniband"),
    MachineCheck("shm", "sharing", "check_shared_memory", deadline_s=60.0),
    MachineCheck("limits", "needs", "check_limits"),
    MachineCheck("hugepages", "needs", "check_huge_pages"),
    MachineCheck("space", "space", "check_space"),
    MachineCheck("folder", "space", "check_run_folder", deadline_s=60.0),
    MachineCheck("ports", "needs", "check_ports"),
    MachineCheck("cache", "space", "check_hub_cache"),
    MachineCheck("model", "space", "check_models", deadline_s=60.0),
    MachineCheck("container", "hardware", "check_container", deadline_s=40.0),
)


def choose_checks(names: str) -> tuple[MachineCheck, ...]:
    """Return the checks of a comma-separated list, in their order; all for an empty one.

    Raises ValueError naming a check that there is not.
    """
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    known = [check.name for check in CHECKS]
    for name in chosen:
        if name not in known:
            raise ValueError(f"--only={names}: no check {name!r}; there are {', '.join(known)}")
    return tuple(check for check in CHECKS if check.name in (chosen or known))


def run_checks(checks: Sequence[MachineCheck], needs: MachineNeeds) -> list[Finding]:
    return [finding for check in checks for finding in run_check(check, needs)]


def run_check(check: MachineCheck, needs: MachineNeeds) -> list[Finding]:
    """Return the findings of a check, or that it did not answer by its deadline.

    It runs in a thread that is left behind if it hangs, as on a file server that is gone.
    """
    found: list[Finding] = []

    def find() -> None:
        try:
            found.extend(check.find(needs))
        except ModuleNotFoundError as error:
            remedy = f"pip install {(error.name or '').partition('.')[0]}"
            found.append(fail(check.name, f"{error.name} is not installed", remedy))
        except PermissionError as error:
            path, _, remedy = explain_refusal(error).partition("; ")
            found.append(fail(check.name, path, remedy))
        except Exception as error:  # a check that breaks must not hide what the others find
            text = f"the check itself failed: {describe_error(error)}"
            remedy = "report it, with this line; --only leaves this check out"
            found.append(fail(check.name, text, remedy))

    thread = threading.Thread(target=find, name=f"doctor {check.name}", daemon=True)
    thread.start()
    thread.join(check.deadline_s)
    if thread.is_alive():
        text = f"no answer in {check.deadline_s:g} s"
        remedy = "look for a filesystem, driver or daemon that hangs: dmesg, mount, nvidia-smi"
        return [fail(check.name, text, remedy)]
    return found
