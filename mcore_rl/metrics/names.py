"""Names of the metrics. A row of metrics.jsonl holds step, timestamp (unix seconds) and any of:

  reward/mean std groups_without_signal     rewards of the rollout; share of groups with equal rewards
  reward/part/<name> errors                 means of what rewards are made of; samples whose reward failed
  sampling/rounds samples kept_share reward_mean   dynamic sampling, before groups were left out
  rollout/samples response_len response_len_max truncated_share tokens_per_second
  loss/total                                the weighted sum that was differentiated, router aux loss left out
  loss/policy entropy                       token means: clipped surrogate, entropy in nats; loss/nll in SFT
  loss/grad_norm train/learning_rate train/tokens train/optimizer_steps train/tokens_per_second
  clip/low_share high_share                 tokens whose gradient the clip took away
  ratio/mean token_max kl/old_new           policy against the old policy that sampled
  kl/ref                                    policy against the reference, by algorithm.kl.estimator
  kl/teacher                                reverse KL of the policy to the teacher, per sampled token
  preference/loss accuracy margin chosen_reward rejected_reward chosen_logprob rejected_logprob   of pairs
  kl/reward coef                            a KL in the reward: of the old policy, and its weight
  logprob_diff/mean token_max clipped_share |trainer - engine| in nats, same weights; share outside the clip
  time/<phase> time/step                    wall seconds; time/sync is the weight sync and its canary
  idle/trainer engines                      share of the time without work (docs/async.md)
  staleness/mean max                        versions from the oldest token to the weights that train on it
  staleness/partial dropped                 samples drawn by several versions; samples that grew too stale
  staleness/restarted                       responses that were cut off when weights changed, so far
  buffer/finished unfinished                groups begun beside training that the step did not take
  logprob_diff/stale router arithmetic      parts that add up to the mean; stale_share, router_flip_share
  router/replaced_share                     tokens whose experts train.router_replay changed in some layer
  sync/seconds transfer_seconds mib trainer_mib engines_failed   the weight sync as it measured itself
  sync/pause_s                             the part in which an engine does not generate, worst engine
  sync/canary_diff                         |trainer - engine| in nats right after the sync, worst engine
  router/aux_loss seq_aux_loss              load balance of the experts, 1 is perfect (coefficient not 0)
  router/max_violation idle_share load_entropy   load of the experts; router/layer_<i>/... of each layer
  eval/greedy_accuracy greedy_reward prompts pass_at_<k>   held-out evaluation, step 0 before training

Token metrics are means over the trained tokens, those named *_max maxima.
Rows of samples.jsonl: step, split (train or eval), prompt_index, prompt, response, reward, ground_truth,
finish_reason, weights (the versions that drew it).
"""

from collections.abc import Mapping

FORMER_NAMES = {
    "sync/": "refit/",
    "time/sync": "time/refit",
    "time/pause": "time/settle",
}
"""Beginnings of names -> those of version 0.1, under which the same values are kept for one version more."""


def with_former_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """`metrics`, and again under the names of version 0.1 where those differ."""
    former = {
        old + name.removeprefix(new): value
        for name, value in metrics.items()
        for new, old in FORMER_NAMES.items()
        if name.startswith(new)
    }
    return {**metrics, **former}
