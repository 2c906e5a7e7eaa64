"""Reads what a recipe and the command's options need of the machine, and checks ports and limits.

Limits are those of this process: open files, processes, locked memory, and huge pages.
"""

import re
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from mcore_rl.process.network import is_free
from mcore_rl.tools.doctor.machine.finding import Finding, fail, ok, warn

CONTAINER_RUNTIMES = ("pyxis", "apptainer", "docker")


@dataclass(frozen=True)
class NamedModel:
    """A model that a run reads: the option that names it, its path or hub id, and its weights."""

    option: str
    path: str
    revision: str | None = None
    with_weights: bool = True


@dataclass(frozen=True)
class MachineNeeds:
    """The values against which a machine is checked.

    run_dir             folder that the run writes
    object_store_mib    shared memory for the Ray that starts here; None: the default; 0: no Ray
                        starts here
    gpus                GPUs of the recipe on all machines together; 0: no recipe is given
    gpus_per_node       GPUs of one machine, as the recipe's plan.ranks_per_host says
    kept_checkpoints    how many checkpoints lie in run_dir at once
    ports               ports that have to be free
    interface           network interface; empty: that of NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME
    container           one of CONTAINER_RUNTIMES, or "": none is asked for
    """

    run_dir: Path = Path("runs")
    models: tuple[NamedModel, ...] = ()
    object_store_mib: int | None = None
    gpus: int = 0
    gpus_per_node: int = 8
    kept_checkpoints: int = 0
    ports: tuple[int, ...] = ()
    interface: str = ""
    container: str = ""
    num_nodes: int = 1


@dataclass(frozen=True)
class RecipeNeeds:
    """The part of the needs that a recipe gives."""

    run_dir: Path
    models: tuple[NamedModel, ...]
    object_store_mib: int | None
    gpus: int
    gpus_per_node: int
    kept_checkpoints: int


def read_recipe(settings: Sequence[str]) -> RecipeNeeds:
    """Return what recipe=<name> and its overrides ask of a machine; nothing is downloaded.

    Raises ValueError if there is no recipe, or naming the key or value at fault.
    """
    # Only here: a machine can be checked before Hydra and megatron-core are on it.
    from mcore_rl.config.recipe import load_recipe
    from mcore_rl.planning.bundles import RunSize

    recipes = [s.removeprefix("recipe=") for s in settings if s.startswith("recipe=")]
    if len(recipes) != 1:
        raise ValueError(
            f"{' '.join(settings)}: give one recipe=<name> with its overrides, or none and"
            " --run-dir and --model"
        )
    config = load_recipe(recipes[0], [s for s in settings if not s.startswith("recipe=")])
    size = RunSize.make(config, "train")
    policy = config.model
    models = [
        NamedModel("model.path", policy.path, policy.revision, with_weights=policy.init == "hf")
    ]
    if size.critic:
        models.append(NamedModel("critic.path", config.critic.path))
    models += [
        NamedModel(f"{role}.path", model.path) for role, model in config.served_models.items()
    ]
    return RecipeNeeds(
        run_dir=Path(config.run.dir or "runs"),
        models=tuple(model for model in models if model.path),
        object_store_mib=0 if config.cluster.address else config.cluster.object_store_mib,
        gpus=size.count_all_gpus(),
        gpus_per_node=config.plan.ranks_per_host,
        kept_checkpoints=config.checkpoint.keep + config.checkpoint.keep_best + 1,
    )


FILES = (1024, 65536)
"""Fewer open files than the first do not do: each rank and engine holds a socket to every peer.
With fewer than the second, Ray warns, and runs of many nodes stop."""
PROCESSES = (1024, 8192)
"""A machine of eight ranks and engines starts some thousand threads."""


def check_limits(needs: MachineNeeds) -> list[Finding]:
    """Whether ulimits, and the limit of a container, let a run open files and start threads."""
    files, files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = [_grade("open files", files, FILES, _raise_files(files_hard))]
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    remedy = "ulimit -u unlimited, or nproc in /etc/security/limits.conf"
    found.append(_grade("processes", processes, PROCESSES, remedy))
    pids = _read_pids_limit(Path("/sys/fs/cgroup"))
    if pids is not None:
        found.append(_grade("container pids", pids, PROCESSES, "docker run --pids-limit -1"))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked >> 10} KiB"
    found.append(ok("locked memory", text))  # InfiniBand asks for more: hardware.py
    return found


def _grade(check: str, limit: int, bounds: tuple[int, int], remedy: str) -> Finding:
    if limit == resource.RLIM_INFINITY:
        return ok(check, "unlimited")
    least, enough = bounds
    if limit < least:
        return fail(check, f"at most {limit}, a run needs {least}", remedy, limit=limit)
    if limit < enough:
        text = f"at most {limit}; runs of several machines need {enough}"
        return warn(check, text, remedy, limit=limit)
    return ok(check, f"at most {limit}", limit=limit)


def _raise_files(hard: int) -> str:
    if hard == resource.RLIM_INFINITY or hard >= FILES[1]:
        return f"ulimit -n {FILES[1]}; docker run --ulimit nofile={FILES[1]}"
    return f"the hard limit is {hard}: raise nofile in /etc/security/limits.conf to {FILES[1]}"


def _read_pids_limit(cgroup: Path) -> int | None:
    """The most processes of this control group, or None if it has no such limit."""
    try:
        text = (cgroup / "pids.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def check_huge_pages(needs: MachineNeeds, root: Path = Path("/")) -> list[Finding]:
    """How the kernel gives huge pages, which large host copies of weights are read through."""
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    try:
        setting = path.read_text().strip()
    except OSError as error:
        return [ok("huge pages", f"the kernel does not say ({error.strerror})")]
    chosen = re.search(r"\[(\w+)\]", setting)
    word = chosen[1] if chosen else setting
    if word == "never":
        remedy = f"echo madvise > {path} makes copies of large host memory cheaper"
        return [warn("huge pages", "transparent huge pages: never", remedy)]
    return [ok("huge pages", f"transparent huge pages: {word}")]


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
            found.append(fail("ports", f"{port} is taken{_find_holder(port)}", remedy, port=port))
    if found or not needs.ports:
        return found
    low, high = _read_outgoing()
    inside = [port for port in needs.ports if low <= port <= high and port not in RAY_HEAD_PORTS]
    if inside:
        text = f"{inside[0]} is free, but outgoing connections take ports from {low} to {high}"
        return [warn("ports", text, f"choose a port below {low}", port=inside[0])]
    return [ok("ports", f"{', '.join(map(str, needs.ports))} free")]


def _read_outgoing() -> tuple[int, int]:
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return int(low), int(high)


def _find_holder(port: int) -> str:
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
