"""Declares what a launch file may say; a key or value that does not fit is refused by name."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from mcore_rl.config.bounds import Options, bounded
from mcore_rl.process.redaction import is_secret_name


@dataclass
class LaunchOptions(Options, group="launch"):
    """Options that every target has. The number of nodes comes from the recipe."""

    is_away: ClassVar[bool] = False
    """The job does not see this machine's files; run.dir is a folder of its nodes."""

    target: str = ""
    nodes: int | None = bounded(None, ge=1)
    """Nodes of the job; None: as many as the recipe fills."""
    gpus_per_node: int | None = bounded(None, ge=0)
    """None: plan.ranks_per_host of the recipe; 0: a run without GPUs."""
    cpus_per_node: int | None = bounded(None, ge=1)
    """None: as many as the recipe's ranks and engines reserve on the fullest node."""
    object_store_mib: int | None = bounded(None, ge=75)
    """Ray's shared memory on each node; None: 8192 with GPUs, 512 without."""
    interface: str = ""
    """Network interface by name; empty: the one that leads to the other nodes."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of all processes of the job. They are written to files: no secrets."""
    image_folders: list[str] = field(default_factory=list)
    """Folders of the image with a model, data or code of the recipe, which the job finds there;
    other paths have to lie on what is mounted."""
    start_timeout_s: float = bounded(600.0, gt=0)
    """How long the nodes of a job wait for one another once the first one runs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.environment:
            if is_secret_name(name):
                raise ValueError(
                    f"launch.environment.{name}: the job's files would show this secret; set it in"
                    " the environment from which you submit, or refer to the cluster's own store of"
                    " secrets"
                )

    @property
    def notice_s(self) -> int:
        """Seconds between the signal to save and the end of the job; 0: the target gives none."""
        return 0

    def store_mib(self, gpus_per_node: int) -> int:
        """Ray's shared memory on a node with so many GPUs."""
        if self.object_store_mib is not None:
            return self.object_store_mib
        return 8192 if gpus_per_node else 512


@dataclass
class LocalOptions(LaunchOptions, group="launch"):
    """Nodes that are processes of this machine, for rehearsals of a cluster."""

    python: str = ""
    """Interpreter that has this package; empty: the one that submits."""


@dataclass
class SlurmOptions(LaunchOptions, group="launch"):
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    time_limit: str = ""
    """As in `sbatch --time`; empty: the partition's."""
    exclusive: bool = True
    memory_gib_per_node: int = bounded(0, ge=0)
    """0: all of a node's."""
    sbatch: list[str] = field(default_factory=list)
    """Further options of sbatch, such as "--mail-type=END"."""
    setup: list[str] = field(default_factory=list)
    """Lines of shell that run first on the first node, such as "module load cuda"."""
    container: Literal["none", "pyxis", "apptainer"] = "none"
    """none: the interpreter lies on a shared folder."""
    image: str = ""
    mounts: list[str] = field(default_factory=list)
    """Folders that the container gets besides the run's: "/host/path:/container/path"."""
    python: str = ""
    """Interpreter that has this package; empty: the one that submits, in a container `python`."""
    save_before_end_s: int = bounded(300, ge=30)
    """SLURM signals the run so long before its time limit. It has as long to save (run.grace_s),
    and is queued again."""
    requeues: int = bounded(10, ge=0)
    """How often the job is queued again, at most; 0: never."""
    retries: int = bounded(3, ge=0)
    """How many of the requeues may follow failures, such as a rank's death; 0: none. A run that
    refused its settings (status 2) or was canceled is never queued again."""
    seeds: list[int] = field(default_factory=list)
    """A job array: one run for each, with run.seed, in <run.dir>/seed_<n>."""
    engine_partition: str = ""
    """A heterogeneous job: engines on nodes of this partition, trainer and critic on the others'.
    Takes cluster.separate_nodes=true."""
    engine_constraint: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.container == "none") != (not self.image):
            raise ValueError(
                f"launch.container={self.container} with launch.image={self.image!r}: give both, or"
                " neither"
            )
        if self.mounts and self.container == "none":
            raise ValueError(
                f"launch.mounts={self.mounts}: nothing is mounted without launch.container"
            )
        if self.engine_constraint and not self.engine_partition:
            raise ValueError(
                f"launch.engine_constraint={self.engine_constraint}: engines have nodes of their"
                " own only with launch.engine_partition"
            )

    @property
    def notice_s(self) -> int:
        return self.save_before_end_s


@dataclass
class KubeRayOptions(LaunchOptions, group="launch"):
    """Pods of KubeRay 1.6 or newer, one for each node. `gpus_per_node` is what a pod gets."""

    is_away: ClassVar[bool] = True

    kind: Literal["job", "cluster"] = "job"
    """job: a RayJob that runs the command; cluster: a RayCluster to work in by hand."""
    name: str = ""
    """The RayJob's; empty: <command>-<name of run.dir>."""
    namespace: str = "default"
    context: str = ""
    """Context of kubectl for submit, status, logs and cancel; empty: its current one."""
    image: str = ""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    image_pull_secrets: list[str] = field(default_factory=list)
    gpu_resource: str = "nvidia.com/gpu"
    """amd.com/gpu on nodes with AMD's device plugin."""
    rdma_resource: str = ""
    """Such as rdma/ib; empty: none."""
    rdma_per_node: int = bounded(1, ge=1)
    memory_gib_per_node: int = bounded(0, ge=0)
    """0: no limit but the node's own."""
    shm_gib: int = bounded(0, ge=0)
    """/dev/shm, where Ray's objects and SGLang's and NCCL's buffers lie; 0: no limit of its own."""
    claims: dict[str, str] = field(default_factory=dict)
    """Persistent volume claims, ReadWriteMany, by name: where they are mounted. run.dir lies below
    one of them."""
    secrets: dict[str, str] = field(default_factory=dict)
    """Variables from secrets of the namespace: HF_TOKEN: <secret>/<key>."""
    queue: str = ""
    """Kueue's LocalQueue, which lets all pods in at once or none."""
    priority_class: str = ""
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: list[str] = field(default_factory=list)
    """Taints that pods tolerate: key, key=value, or either with :effect."""
    service_account: str = ""
    host_network: bool = False
    """Pods use their node's network, as some RDMA set-ups want; one pod then has a node alone."""
    capabilities: list[str] = field(default_factory=list)
    """Linux capabilities of the containers, such as IPC_LOCK for RDMA."""
    submission_mode: Literal["K8sJobMode", "HTTPMode"] = "K8sJobMode"
    """K8sJobMode: a pod waits for Ray's head, submits and prints the log; HTTPMode: the operator
    submits, without a pod."""
    submit_retries: int = bounded(5, ge=0)
    """How often the submitting pod is started again if it fails."""
    retries: int = bounded(3, ge=0)
    """How often a new cluster continues a run that failed, was preempted or lost a node."""
    save_before_end_s: int = bounded(300, ge=30)
    """How long pods that are evicted or deleted wait for the run to save (run.grace_s)."""
    time_limit_s: int = bounded(0, ge=0)
    """The job ends after so long, waiting and retries included; 0: never."""
    keep_cluster_s: int = bounded(600, ge=0)
    """How long the pods stay after the run ended, for a look at them."""
    auth: Literal["token", "disabled"] = "token"
    """Ray's token authentication; KubeRay makes a token for each cluster."""
    start_timeout_s: float = bounded(3600.0, ge=1)
    """A job whose pods have not all started after so long gives their GPUs back, and is tried again
    if retries are left. Images are pulled in this time; a wait in Kueue's queue does not count."""
    python: str = "python"
    """Interpreter in the image that has this package."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for variable, reference in self.secrets.items():
            if reference.count("/") != 1 or not all(reference.split("/")):
                raise ValueError(
                    f"launch.secrets.{variable}: expected <secret>/<key>, the name of a Kubernetes"
                    " secret and of its key, never a value"
                )

    @property
    def notice_s(self) -> int:
        return self.save_before_end_s


@dataclass
class SkyPilotOptions(LaunchOptions, group="launch"):
    """Machines of a cloud, or pods, that SkyPilot starts."""

    is_away: ClassVar[bool] = True

    name: str = ""
    """The job's, and the cluster's where managed=false; empty: <command>-<name of run.dir>."""
    managed: bool = True
    """A managed job is started again after a preemption, and its machines end with it."""
    infra: str = ""
    """Such as aws/us-east-1 or k8s/<context>; empty: the cheapest that SkyPilot finds."""
    accelerator: str = ""
    """SkyPilot's name of the GPU, such as H100; `sky gpus list` lists them."""
    instance_type: str = ""
    use_spot: bool = False
    disk_gib: int = bounded(512, ge=1)
    network_tier: Literal["standard", "best"] = "best"
    """best: the cloud's fast network between machines, where it has one."""
    image: str = ""
    """A machine image, or docker:<image>, which holds this package; empty: `setup` installs it."""
    memory_gib_per_node: int = bounded(0, ge=0)
    """At least so much; 0: whatever comes with the GPUs."""
    buckets: dict[str, str] = field(default_factory=dict)
    """Buckets by where they are mounted: /ckpt: s3://my-bucket. run.dir lies below one, or below a
    volume."""
    volumes: dict[str, str] = field(default_factory=dict)
    """SkyPilot's volumes by where they are mounted: /shared: my-volume."""
    secrets: list[str] = field(default_factory=list)
    """Names of variables that `sky` takes from the shell that submits, such as HF_TOKEN."""
    setup: list[str] = field(default_factory=list)
    """Lines of shell that run once on each new machine."""
    retries: int = bounded(3, ge=0)
    """How often a managed job that failed is started again; preemptions and runs that saved on
    request do not count."""
    stop_after_idle_min: int = bounded(30, ge=0)
    """managed=false: the cluster is taken down after so long without a job; 0: never."""
    python: str = "python"
    """Interpreter on the machines that has this package."""
