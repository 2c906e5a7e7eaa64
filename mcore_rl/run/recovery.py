"""Sets up the recovery of a command's trainer and critic."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

from mcore_rl.algo.registry import Needs
from mcore_rl.cluster.model_group import ModelGroup
from mcore_rl.cluster.outliving import Outliving
from mcore_rl.cluster.run import RunProcesses
from mcore_rl.cluster.state_keepers import NoMemoryError, StateKeepers
from mcore_rl.config import RunConfig
from mcore_rl.logs.progress import say
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.loops.roles import NO_RECOVERY, Recovery
from mcore_rl.process import relaunch
from mcore_rl.run.kept_start import hold_positions
from mcore_rl.run.parts import StartedRun
from mcore_rl.run.roles.colocation import EngineMemory, SharedGpus
from mcore_rl.run.roles.recovery import RankRecovery, Recovered, Rewound
from mcore_rl.run.roles.weight_sync import EngineSync


@dataclass(frozen=True)
class TrainedModels:
    """The models that a command trains, the trainer first, and what depends on their ranks.

    prepare       what a start does with the trainer before it loads a state
    gpus          the GPUs that models share; None: they share none
    forget_links  has the next weight sync link engines anew
    rewound       a role of the controller that goes back with the ranks
    """

    models: tuple[ModelGroup, ...]
    prepare: Callable[[], None] | None = None
    gpus: SharedGpus | None = None
    forget_links: Callable[[], None] = lambda: None
    rewound: Rewound | None = None

    def prepare_model(self, role: str) -> None:
        """Prepare the ranks of a model that are new."""
        if self.prepare is not None and role == self.models[0].role:
            self.prepare()


def recover_run(
    options: RunConfig,
    run: StartedRun,
    weights: EngineSync,
    rewound: Rewound,
    start_step: int,
    needs: Needs,
) -> AbstractContextManager[Recovery]:
    """Return the recovery of a run that trains a policy with engines; see open_recovery.

    needs   those of its algorithm
    """
    started = run.started
    trained = TrainedModels(
        models=tuple(filter(None, (started.trainer, started.critic))),
        prepare=started.trainer.snapshot_reference if needs.reference else None,
        gpus=started.gpus,
        forget_links=weights.forget_links,
        rewound=rewound,
    )
    return open_recovery(options, run.processes, run.folder, trained, start_step)


@contextmanager
def open_recovery(
    options: RunConfig,
    processes: RunProcesses,
    folder: RunFolder,
    trained: TrainedModels,
    start_step: int,
) -> Iterator[Recovery]:
    """Yield the recovery of the models, which have the state after `start_step`, for the block.

    Where a host has too little memory for their states, the console says so, and nothing is
    recovered.
    """
    if not options.recovery.is_used:
        yield NO_RECOVERY
        return
    nodes = {node for model in trained.models for node in model.list_nodes()}
    with _open_keepers(processes.outliving, nodes, options.call_timeout_s) as keepers:
        try:
            for model in trained.models:
                model.let_shrink(options.recovery.min_dp)
                model.keep_in(keepers)
        except NoMemoryError as error:
            say(
                f"lost ranks will not be recovered, and end the run: {error};"
                " run.recovery.partner=none says the same without this line"
            )
            yield NO_RECOVERY
            return
        recovered = Recovered(
            models=trained.models,
            gpus=trained.gpus or SharedGpus(EngineMemory((), 0.0), processes.run_watched),
            folder=folder,
            prepare=trained.prepare_model,
            renew=keepers.renew,
            settle=keepers.settle,
            forget_links=trained.forget_links,
            rewound=trained.rewound,
            note_done=partial(hold_positions, processes, keepers),
        )
        num_ranks = sum(model.world_size for model in trained.models)
        recovery = RankRecovery(recovered, options.recovery.limit_restarts(num_ranks), start_step)
        relaunch.allow_relaunch()
        processes.recovers = True
        if recovered.gpus.are_apart:  # otherwise others have the GPUs while engines sample
            processes.recover_beside_sampling = recovery.recover
        try:
            yield recovery
        finally:
            processes.recovers = False
            processes.recover_beside_sampling = None


@contextmanager
def _open_keepers(
    outliving: Outliving, nodes: Collection[str], timeout_s: float
) -> Iterator[StateKeepers]:
    """Yield keepers; they end with the block, but not where Ray is lost, as others go on then."""
    keepers = outliving.open_keepers(nodes, timeout_s)
    try:
        yield keepers
    except Exception:
        keepers.close()
        raise
    keepers.close()
