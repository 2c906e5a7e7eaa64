"""Reads off a recipe and the command's options what the machine is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
    from mcore_rl.planning.run_size import RunSize

    recipes = [s.removeprefix("recipe=") for s in settings if s.startswith("recipe=")]
    if len(recipes) != 1:
        raise ValueError(
            f"{' '.join(settings)}: give one recipe=<name> with its overrides, or none and"
            " --run-dir and --model"
        )
    config = load_recipe(recipes[0], [s for s in settings if not s.startswith("recipe=")])
    size = RunSize.of(config, "train")
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
        gpus=round(size.num_cpus(1.0, config.rollout.engine_ranks)),
        gpus_per_node=config.plan.ranks_per_host,
        kept_checkpoints=config.checkpoint.keep + 1,
    )
