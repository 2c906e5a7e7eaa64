"""Options that a recipe does without have a reason, and the table has no others."""

from mcore_rl.tools.translate.verl_unneeded import UNNEEDED, reason_of
from tests.tools.translate.verl_options import KINDS, defaults_of

OF_OTHER_VERSIONS = {
    "actor_rollout_ref.actor.use_fused_kernels",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes",
    "reward.reward_kwargs",
    "actor_rollout_ref.actor.load_weight",
    "actor_rollout_ref.actor.router_replay",
    "actor_rollout_ref.actor.veomni",
    "actor_rollout_ref.ref.veomni",
    "actor_rollout_ref.actor.sum_pi_squared_checkpointing",
    "actor_rollout_ref.rollout.layer_name_map",
    "data.datagen.name",
    "data.sampler.class_name",
    "trainer.use_legacy_worker_impl",
    "async_training.checkpoint_engine",
    "async_training.compute_prox_log_prob",
    "async_training.concurrent_samples_per_replica",
    "async_training.dynamic_schedule_",
    "rollout.n",
}
"""They belong to verl before or after 0.9, to its recipes, or to programs that sample ahead."""


def test_the_longest_name_decides() -> None:
    assert reason_of("actor_rollout_ref.rollout.mode") == UNNEEDED["actor_rollout_ref.rollout.mode"]
    assert reason_of("actor_rollout_ref.actor.kl_loss_coef") == "read with use_kl_loss only"
    assert reason_of("critic.profiler.tool") == "profile.*"
    assert reason_of("trainer.nonsense") is None


def test_every_entry_is_an_option_of_verls() -> None:
    names = {name for kind in KINDS for name in defaults_of(kind)}
    idle = {p for p in UNNEEDED if not any(name.startswith(p) for name in names)}
    assert idle <= OF_OTHER_VERSIONS
