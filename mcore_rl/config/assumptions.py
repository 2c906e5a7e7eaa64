"""Options of `mcore-rl plan` and `simulate`: what is assumed of hardware, responses, failures."""

from dataclasses import dataclass
from typing import Literal

from mcore_rl.config.bounds import Options, bounded


@dataclass
class PlanConfig(Options, group="plan"):
    """Assumptions of `mcore-rl plan` about the cluster."""

    link_gbps: float = bounded(400.0, gt=0)
    """Speed of each rank's network link, 10**9 bits per second, in each direction."""
    memory_gbps: float = bounded(400.0, gt=0)
    """Speed at which a rank copies what another rank of its machine holds, 10**9 bits per
    second. The default is shared memory behind PCIe 5.0 x16; CUDA IPC over NVLink is several
    times faster."""
    ranks_per_host: int = bounded(8, ge=1)
    """GPUs of a host."""
    gpu_memory_gib: float = bounded(80.0, gt=0)
    """Memory of a GPU."""
    process_gib: float = bounded(5.0, gt=0)
    """GPU memory that each process takes besides: CUDA context, NCCL's buffers for training or for
    an engine's ranks, fragmentation (docs/plan.md)."""
    expert_load: float = bounded(1.25, ge=1)
    """Tokens for the experts of the most loaded rank, divided by the mean over ranks."""
    image_share: float = bounded(1.0, gt=0, le=1)
    """Share of a micro-batch's tokens that stand for different images, where it is largest: of a
    model with a vision tower. The default is more than any micro-batch has."""


@dataclass
class SimulateConfig(Options, group="simulate"):
    """Assumptions of `mcore-rl simulate`; it also reads those of plan."""

    gpu: Literal["a100", "h20", "h100", "h200", "b200", "mi300x", "cpu"] = "h100"
    """Hardware whose speeds are assumed."""
    cores: int = bounded(0, ge=0)
    """Cores of each machine, which trainer ranks and engines of a run on CPUs share; 0: each rank
    has a core of its own."""
    steps: int = bounded(4, ge=1)
    """Steps of the loop that are simulated."""
    calibration: str = ""
    """run.dir of a run in rollout.mode=sync of two steps or more, whose times correct the
    predicted ones."""
    prompt_len: int = bounded(0, ge=0)
    """Tokens of each prompt, at most data.max_prompt_len; 0: 256, or as many as that allows."""
    image_tokens: int = bounded(0, ge=0)
    """Those of them that stand for an image, one in each prompt; 0: prompts have none."""
    response_len: float = bounded(0.0, ge=0)
    """Mean tokens of a response, before the cut at rollout.max_response_len; 0: 0.4 of that."""
    response_spread: float = bounded(0.6, ge=0)
    """Standard deviation of the logarithm of response lengths: 0: all are equal."""
    prompt_share: float = bounded(0.5, ge=0, le=1)
    """Share of that variance which lies between prompts; the rest lies between samples of one."""
    prompts: int = bounded(0, ge=0)
    """Prompts of an epoch; 0: none comes a second time."""
    reward_s: float = bounded(0.0, ge=0)
    """Seconds that a group of samples waits for its rewards."""
    mtbf_hours: float = bounded(0.0, ge=0)
    """Mean time between failures of each GPU; 0: none fails."""
    node_mtbf_hours: float = bounded(0.0, ge=0)
    """Mean time between failures of each machine; 0: none fails. Without a spare machine in its
    place, its ranks end the run, and its engines are gone for good."""
    spare_nodes: int = bounded(0, ge=0)
    """Machines more than the recipe needs, to which ranks and engines of lost ones move."""
    notice_s: float = bounded(10.0, ge=0)
    """Seconds until a lost rank or machine is noticed. A rank that dies shows at once, one that is
    stopped after a quarter of run.call_timeout_s, at most 30 s."""
    replace_s: float = bounded(60.0, gt=0)
    """Seconds in which processes take the place of lost ranks and build the model; to read their
    state from memory takes what its bytes take, besides (run.recovery)."""
    restart_s: float = bounded(300.0, gt=0)
    """Seconds in which a job that ended for a lost rank is queued again and its processes start; to
    read the newest checkpoint takes what its bytes take, besides."""
    storage_gbps: float = bounded(40.0, gt=0)
    """Speed at which a machine reads and writes checkpoints, 10**9 bits per second."""
    engine_restart_s: float = bounded(180.0, gt=0)
    """Seconds until the server of a lost engine runs again."""
    slow_share: float = bounded(0.0, ge=0, le=1)
    """Share of engines that are slow."""
    slow_ranks: float = bounded(0.0, ge=0, le=1)
    """Share of the ranks of trainer and critic that are slow; the others wait for them."""
    slowdown: float = bounded(1.5, ge=1)
    """How many times longer slow engines and ranks take."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cores and self.gpu != "cpu":
            raise ValueError(
                f"simulate.cores={self.cores} with simulate.gpu={self.gpu}: ranks on GPUs share no"
                " cores; set simulate.cores=0, or simulate.gpu=cpu"
            )
