"""Checks that a recipe gives its algorithm what it needs.

These checks ask for the needs of the chosen advantage and loss, which are declared where they are
registered. Errors name the options, their values and a remedy. What contradicts another option
whatever the algorithm is refused by config/tree_checks.py.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mcore_rl.algo.aggregation import AGGREGATIONS
from mcore_rl.algo.lookup import needs_of
from mcore_rl.algo.preferences import PAIR_LOSSES
from mcore_rl.algo.registry import Needs, Registry, advantages, losses
from mcore_rl.checks.needs import (
    check_no_teacher,
    check_samples,
    check_teacher_path,
    find_unread_critic,
)
from mcore_rl.config import (
    AlgorithmConfig,
    ClusterConfig,
    Config,
    ParallelConfig,
    PreferenceConfig,
    RolloutConfig,
    ServedModelConfig,
    TrainConfig,
)
from mcore_rl.config.tree_checks import Unread, refuse


def check_names(algorithm: AlgorithmConfig) -> None:
    """Raise ValueError naming the first option that chooses a function that nobody registered."""
    needs_of(algorithm)
    _ = AGGREGATIONS[algorithm.aggregation]
    _ = PAIR_LOSSES[algorithm.preference.loss]


def check_algorithm(config: Config) -> None:
    """Raise ValueError if the algorithm is unknown, or the recipe lacks what it needs."""
    check_names(config.algorithm)
    needs = needs_of(config.algorithm)
    check_options(config.algorithm, needs)
    check_truncated(config.algorithm)
    refuse(config, find_unread_in_preference(config.algorithm.preference))
    refuse(config, _unread(config.algorithm, needs))
    if needs.others:
        check_samples(config.algorithm.advantage, config.rollout.samples_per_prompt)
    check_pairs(config.algorithm, config.train, needs)
    check_teacher(config.algorithm, config.teacher, config.rollout, needs)
    check_replay(config.algorithm, config.train, needs)
    shares_critic = needs.critic and config.critic.colocated
    if shares_critic:
        check_critic_fits(config.critic.parallel, config.parallel)
    check_offload(config.cluster, config.served_models, shares_critic)


def find_unread_in_preference(preference: PreferenceConfig) -> Iterator[Unread]:
    """Yield the options that the loss of pairs ignores. Raises ValueError if it is unknown."""
    yield from _unread_by(PAIR_LOSSES, preference.loss)


def _unread_by(registry: Registry[Any], name: str) -> Iterator[Unread]:
    """Yield the options that other choices of the registry read and `name` does not."""
    for option, readers in registry.unread_by(name).items():
        remedy = f"set {registry.option}={' or '.join(readers)}"
        yield Unread((option,), f"{registry.option}={name}", remedy)


def _unread(algorithm: AlgorithmConfig, needs: Needs) -> Iterator[Unread]:
    """Yield the options that the chosen advantage and loss have no use for."""
    yield from _unread_by(advantages, algorithm.advantage)
    yield from _unread_by(losses, algorithm.loss)
    if not needs.critic:
        yield find_unread_critic(algorithm.advantage)
    if not needs.reference:
        remedy = "set algorithm.kl.coef above 0"
        yield Unread(("algorithm.kl.estimator",), "algorithm.kl.coef=0", remedy)


def check_options(algorithm: AlgorithmConfig, needs: Needs) -> None:
    """Raise ValueError if options of the algorithm contradict the chosen advantage."""
    if algorithm.correction.bypass and needs.sum_squares:
        raise ValueError(
            f"algorithm.advantage={algorithm.advantage} with algorithm.correction.bypass=true: it"
            " needs the pass that bypass leaves out; set algorithm.correction.bypass=false"
        )
    kl = algorithm.kl
    if needs.teacher and kl.coef and kl.in_reward and not algorithm.reward_coef:
        raise ValueError(
            f"algorithm.advantage={algorithm.advantage} with algorithm.kl.coef={kl.coef:g},"
            " kl.in_reward=true and reward_coef=0: nothing reads the reward, and so not its KL; set"
            " algorithm.kl.in_reward=false, or algorithm.reward_coef above 0"
        )


def check_truncated(algorithm: AlgorithmConfig) -> None:
    """Raise ValueError if samples that were cut off are to be bootstrapped and left out as well."""
    if algorithm.bootstrap_truncated and algorithm.filter_overlong:
        raise ValueError(
            "algorithm.bootstrap_truncated=true with algorithm.filter_overlong=true: samples that"
            " were cut off are left out of the loss, so that nothing learns from their last value;"
            " set one of them to false"
        )


def check_pairs(algorithm: AlgorithmConfig, train: TrainConfig, needs: Needs) -> None:
    """Raise ValueError if advantages that hold the pairs' loss meet options that do not fit them.

    They need loss=policy_gradient, aggregation=token_sum, no bypass and a single optimizer step.
    """
    if not needs.pairs:
        return
    name = f"algorithm.advantage={algorithm.advantage}"
    form = (algorithm.loss, algorithm.aggregation, algorithm.correction.bypass)
    if form != ("policy_gradient", "token_sum", False):
        raise ValueError(
            f"{name} with loss={algorithm.loss}, aggregation={algorithm.aggregation} and"
            f" correction.bypass={algorithm.correction.bypass}: the whole loss of the pairs is in"
            " the advantages; set algorithm.loss=policy_gradient algorithm.aggregation=token_sum"
            " algorithm.correction.bypass=false"
        )
    _check_beside_pairs(name, algorithm)
    num_steps = train.mini_batches * train.epochs
    if num_steps > 1:
        raise ValueError(
            f"{name} with train.mini_batches * train.epochs = {num_steps}: the pairs' gradient is"
            " that of the policy before the first of these steps; set both to 1"
        )


def _check_beside_pairs(name: str, algorithm: AlgorithmConfig) -> None:
    """Raise ValueError for terms that would be summed over all tokens beside a mean over pairs, and
    for responses that would leave the loss without their pair.
    """
    kl = algorithm.kl
    if (kl.coef and not kl.in_reward) or algorithm.entropy_coef:
        raise ValueError(
            f"{name} with algorithm.kl.coef={kl.coef:g}, kl.in_reward={kl.in_reward} and"
            f" algorithm.entropy_coef={algorithm.entropy_coef:g}: the loss of pairs is a mean over"
            " pairs, and these terms would be sums over all tokens; set both coefficients to 0: the"
            " pairs hold the policy to the reference"
        )
    if algorithm.filter_overlong:
        raise ValueError(
            f"{name} with algorithm.filter_overlong=true: a response that was cut off would leave"
            " the loss, and its pair's other response would stay; set"
            " algorithm.filter_overlong=false"
        )


def check_teacher(
    algorithm: AlgorithmConfig, teacher: ServedModelConfig, rollout: RolloutConfig, needs: Needs
) -> None:
    """Raise ValueError if a teacher is missing, not needed, or at another temperature."""
    name = f"algorithm.advantage={algorithm.advantage}"
    if needs.teacher:
        check_teacher_path(algorithm.advantage, teacher)
    else:
        check_no_teacher(algorithm.advantage, teacher)
    if needs.teacher and rollout.temperature != 1:
        raise ValueError(
            f"{name} with rollout.temperature={rollout.temperature}: a teacher's log-probs are"
            " those at temperature 1; set rollout.temperature=1"
        )


def check_replay(algorithm: AlgorithmConfig, train: TrainConfig, needs: Needs) -> None:
    """Raise ValueError if experts are to be replayed from a pass that the run does not make."""
    has_old_pass = train.epochs * train.mini_batches > 1 or needs.old_logprobs
    if train.router_replay == "old_pass" and (algorithm.correction.bypass or not has_old_pass):
        raise ValueError(
            f"train.router_replay=old_pass with train.mini_batches={train.mini_batches},"
            f" train.epochs={train.epochs} and"
            f" algorithm.correction.bypass={algorithm.correction.bypass}: there is no pass for the"
            " old log-probs; set train.router_replay=engine or none"
        )


def check_critic_fits(critic: ParallelConfig, trainer: ParallelConfig) -> None:
    """Raise ValueError if a colocated critic has more ranks than the trainer."""
    if critic.world_size > trainer.world_size:
        raise ValueError(
            f"critic.colocated=true with {critic.world_size} ranks by critic.parallel: there are"
            f" {trainer.world_size} by parallel to share a GPU with; lower critic.parallel.*"
        )


def check_offload(
    cluster: ClusterConfig, served: Mapping[str, ServedModelConfig], shares_critic: bool
) -> None:
    """Raise ValueError if cluster.offload is set but nothing shares the trainer's GPUs."""
    shares_served = any(model.is_colocated for model in served.values())
    if cluster.offload and not (cluster.colocated or shares_critic or shares_served):
        raise ValueError(
            "cluster.offload=true: nobody else is on the trainer ranks' GPUs; set"
            " cluster.colocated=true, critic.colocated=true or cluster.offload=false"
        )
