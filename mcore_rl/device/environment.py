"""Says which environment variables the processes of a run share, and compares them.

Trainer ranks and engines open NCCL communicators with one another. Variables that change how NCCL
allocates memory must be the same at both ends, though SGLang sets them for its own processes.

A process sees all GPUs of its machine and is told which are its own. One that sees only its own
could not read the memory of another (CUDA IPC), and weights would take NCCL within a machine.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from mcore_rl.process.log_files import ROTATE_BYTES

AGREED = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
"""Variables that all processes must have alike."""
IMEX_CHANNELS = Path("/dev/nvidia-caps-imex-channels")
"""Folder of the channels by which machines that NVLink joins, as in GB200 NVL72, open one another's
memory."""
FORWARDED = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "DEEP_EP_",
    "GLOO_",
    "HF_",
    ROTATE_BYTES,
    "NCCL_",
    "NVSHMEM_",
    "NVTE_",
    "OMP_NUM_THREADS",
    "PYTORCH_",
    "SGLANG_",
    "TOKENIZERS_",
    "TORCH_",
    "TRITON_",
    "UCX_",
)
"""How the variables begin that every process of a run gets from the controller."""
_SAVES_GRAPHS = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
_SECRETS = ("_TOKEN", "SECRET", "PASSWORD", "API_KEY")
_SET_BY_RAY = {"OMP_NUM_THREADS"}
"""Ray sets them in its workers where the controller has none."""


def select_forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ` that every process of a run gets; no secrets."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(FORWARDED) and not any(secret in name for secret in _SECRETS)
    }


def differences(own: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Return variable -> how it differs in `other`, the environment of another process."""
    here, there = select_forwarded(own), select_forwarded(other)
    found = {}
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) == there.get(name) or (name in _SET_BY_RAY and name not in here):
            continue
        found[name] = (
            f"{_describe_value(there.get(name))} instead of {_describe_value(here.get(name))}"
        )
    return found


def choose_agreed(several_hosts: bool, channels: Path = IMEX_CHANNELS) -> dict[str, str]:
    """Return the defaults of the variables in AGREED, which are those that SGLang takes.

    They are off (sglang/srt/entrypoints/engine.py), except that NCCL reaches another machine over
    NVLink only with memory from cuMem. Without, all traffic between machines takes the network.

    several_hosts   the run may have more machines than this one
    channels        IMEX_CHANNELS; a channel there shows that NVLink may join machines
    """
    over_nvlink = several_hosts and any(channels.glob("channel*"))
    return {"NCCL_CUMEM_ENABLE": str(int(over_nvlink)), "NCCL_NVLS_ENABLE": "0"}


def choose_queues(tp: int) -> dict[str, str]:
    """Return the variable that a rank sets before it uses its GPU, unless it is set already.

    With a single hardware queue no collective overtakes the kernel queued before it. Megatron's
    tensor parallelism relies on that order to overlap the two. Without tensor parallelism a single
    queue would only have products and copies of other streams wait for one another.
    """
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if tp > 1 else {}


def can_release_graphs(environ: Mapping[str, str]) -> bool:
    """Return whether engines can release the memory of their CUDA graphs, as SGLang's variable
    asks.
    """
    return environ.get(_SAVES_GRAPHS, "").lower() in ("1", "true", "y", "yes", "t")


def refuse_fixed_graphs(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise ValueError if an engine with these arguments cannot release all of its graphs.

    SGLang 0.5.23 ends where graphs of prefills are captured in its default way ("breakable").
    """
    if "--enable-memory-saver" not in arguments or not can_release_graphs(environ):
        return
    name = "--cuda-graph-backend-prefill"
    backend = arguments[arguments.index(name) + 1] if name in arguments else "breakable"
    if backend == "breakable" and "--disable-prefill-cuda-graph" not in arguments:
        raise ValueError(
            f"{_SAVES_GRAPHS}={environ[_SAVES_GRAPHS]}: SGLang cannot release graphs of prefills"
            " that it captures as breakable; set rollout.sglang.cuda_graph_backend_prefill to full"
            " or disabled, or unset the variable"
        )


def local_indices(gpu_ids: Sequence[str], environ: Mapping[str, str]) -> list[int]:
    """Return where a process with `environ` finds these GPUs among those that it sees.

    `gpu_ids` are as in CUDA_VISIBLE_DEVICES. Raises ValueError if it does not see one.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [int(gpu) for gpu in gpu_ids]
    seen = visible.split(",")
    hidden = [gpu for gpu in gpu_ids if gpu not in seen]
    if hidden:
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={visible} hides GPU {', '.join(hidden)}, which Ray assigned:"
            " start Ray with the same CUDA_VISIBLE_DEVICES as the run, or without"
        )
    return [seen.index(gpu) for gpu in gpu_ids]


def _describe_value(value: str | None) -> str:
    return "unset" if value is None else repr(value)
