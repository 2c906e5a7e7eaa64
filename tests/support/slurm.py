"""A real SLURM of two nodes on this machine: one slurmctld and two slurmd on loopback."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

COMMANDS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel")
NODES = ("n1", "n2")
START_TIMEOUT_S = 60.0
CONFIG = """\
ClusterName=laptop
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort={controller_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2
KillWait=60
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=DEFAULT CPUs=2 RealMemory=4000 State=UNKNOWN
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.2 Port={port_1}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.3 Port={port_2}
PartitionName=all Nodes=n1,n2 Default=YES State=UP MaxTime=INFINITE
PartitionName=first Nodes=n1 State=UP
PartitionName=second Nodes=n2 State=UP
"""


def missing_commands() -> list[str]:
    """SLURM's commands that are not installed here."""
    path = "/usr/sbin:/usr/local/sbin:" + "/usr/bin:/usr/local/bin:/bin"
    return [command for command in COMMANDS if shutil.which(command, path=path) is None]


@contextmanager
def two_nodes(folder: Path, ports: Sequence[int]) -> Iterator[Path]:
    """Start SLURM with its files in `folder`; yield its slurm.conf once both nodes are idle."""
    for name in ("state", *(f"spool/{node}" for node in NODES)):
        (folder / name).mkdir(parents=True)
    config = folder / "slurm.conf"
    values = dict(zip(("controller_port", "port_1", "port_2"), ports, strict=True))
    config.write_text(CONFIG.format(host=socket.gethostname(), folder=folder, **values))
    with ExitStack() as stack:
        for words in (["slurmctld"], *(["slurmd", "-N", node] for node in NODES)):
            stack.enter_context(_daemon([*words, "-D", "-f", str(config)], folder))
        _wait_until_idle(config)
        yield config


@contextmanager
def _daemon(command: Sequence[str], folder: Path) -> Iterator[None]:
    path = shutil.which(command[0], path="/usr/sbin:/usr/local/sbin")
    assert path is not None
    with (folder / f"{'_'.join(command[:3]).replace('/', '_')}.out").open("w") as out:
        process = subprocess.Popen([path, *command[1:]], stdout=out, stderr=out)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_idle(config: Path) -> None:
    until = time.monotonic() + START_TIMEOUT_S
    while True:
        shown = subprocess.run(
            ["sinfo", "-h", "-N", "-p", "all", "-o", "%N %T"],
            env={"SLURM_CONF": str(config), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
        )
        if sorted(shown.stdout.split()) == sorted([*NODES, "idle", "idle"]):
            return
        if time.monotonic() > until:
            raise TimeoutError(f"SLURM's nodes are not idle: {shown.stdout} {shown.stderr}")
        time.sleep(0.5)
