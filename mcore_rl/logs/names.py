"""Every metric with its meaning and unit. docs/metrics.md is this list; a test compares the two."""

import re
from collections.abc import Mapping
from functools import cache

METRICS: Mapping[str, Mapping[str, str]] = {
    "Rewards": {
        "reward/mean": "mean reward of the samples the step trains on",
        "reward/std": "their standard deviation, over all samples",
        "reward/groups_without_signal": "share of groups with equal rewards before penalties;"
        " groups of a single sample are left out",
        "reward/part/<name>": "mean of one number that rewards are made of",
        "reward/errors": "samples drawn for the step whose reward failed (rewards.md)",
        "reward/failed_share": "share of the samples drawn whose reward failed",
    },
    "Sampling": {
        "rollout/samples": "samples the step trains on",
        "rollout/response_len": "mean response length, tokens",
        "rollout/response_len_max": "longest response, tokens",
        "rollout/truncated_share": "share of responses cut off at rollout.max_response_len",
        "rollout/tokens_per_second": "response tokens generated per second of wall time",
        "rollout/lost": "samples lost with their collector, and sampled again",
        "batch/lost": "samples lost after they were scored: the step trains without them",
        "sampling/rounds": "rounds of dynamic sampling",
        "sampling/samples": "samples drawn, before groups without signal were left out",
        "sampling/kept_share": "share of them that was kept",
        "sampling/reward_mean": "their mean reward",
        "buffer/finished": "groups sampled beside training that the step did not take",
        "buffer/unfinished": "groups begun beside training that are not finished",
        "staleness/mean": "weight versions from a sample's oldest token to the weights that train",
        "staleness/max": "the largest such number of versions",
        "staleness/partial": "samples drawn by several versions",
        "staleness/dropped": "samples dropped because they grew too stale",
        "staleness/restarted": "responses cut off by a weight sync, since the start of the run",
    },
    "Episodes": {
        "episodes/turns": "answers of the policy, mean over episodes",
        "episodes/rows": "sequences that train an episode, mean over episodes",
        "episodes/row_tokens": "tokens of these sequences together, trained or not, mean",
        "episodes/forks": "turns that do not simply continue the one before, mean",
        "episodes/environment_s": "seconds that the environment took for its steps, mean",
        "episodes/calls/<status>": "attempts to call a tool that ended so, mean",
        "episodes/end/<reason>": "share of episodes that ended for this reason",
        "episodes/<name>": "a number that the environment gives, mean over episodes",
    },
    "Adapters": {
        "adapters/<adapter>/<name>": "the same of the last step of one of train.lora.adapters",
        "adapters/<adapter>/version": "steps of the loop that have trained it",
    },
    "Training": {
        "loss/total": "the loss that was differentiated, without the router's auxiliary losses",
        "loss/policy": "clipped surrogate, token mean",
        "loss/entropy": "entropy of the policy, nats, token mean",
        "loss/nll": "negative log-likelihood, nats, token mean (sft)",
        "loss/grad_norm": "norm of the gradient before clipping",
        "train/learning_rate": "learning rate of the last optimizer step",
        "train/tokens": "tokens trained on",
        "train/optimizer_steps": "optimizer steps",
        "train/skipped_share": "share of them left out: loss or gradient not finite, or above"
        " grad_norm_skip_threshold",
        "checkpoint/failed": "saves that failed since the newest checkpoint"
        " (checkpoint.on_error=continue)",
        "train/tokens_per_second": "tokens trained on per second of wall time (sft, dpo)",
        "train/tokens_per_second_per_gpu": "tokens per second of an optimizer step, per rank",
        "train/tflops_per_gpu": "operations of the model per second, 10**12, per rank",
        "train/mfu": "their share of what the GPU can do at most (weights/hf/flops.py)",
        "train/tower_tflop": "operations of the vision tower in a step, 10**12, over all ranks",
        "train/peak_memory_gib_max": "most GPU memory of a rank's tensors in a step, GiB",
        "clip/low_share": "share of tokens clipped from below",
        "clip/high_share": "share of tokens clipped from above",
        "clip/dual_share": "share of tokens that the dual clip bounds",
        "clip/held_back_share": "share of tokens that the covariance rule holds back",
        "clip/weight": "vespo: weight of a token's sequence",
        "ratio/mean": "importance ratio of the policy to the old policy that sampled",
        "ratio/token_max": "the largest importance ratio",
        "kl/old_new": "KL of old policy and policy, k3 estimate, nats",
        "kl/ref": "KL of policy and reference by algorithm.kl.estimator, nats",
        "kl/reward": "KL of old policy and reference in the reward, nats",
        "kl/coef": "its weight",
        "kl/teacher": "reverse KL of policy and teacher, nats per sampled token",
        "correction/weight": "importance weight that corrects for the engine's log-probs",
        "correction/normalizer": "mean of the weights, by which they are divided",
        "correction/bounded_share": "share of tokens whose weight is outside its bounds",
        "correction/rejected_share": "share of tokens that are rejected",
    },
    "Preferences": {
        "preference/loss": "loss of the pairs",
        "preference/accuracy": "share of pairs whose chosen response has the larger reward",
        "preference/margin": "reward of the chosen response minus that of the rejected one",
        "preference/chosen_reward": "implicit reward of chosen responses",
        "preference/rejected_reward": "implicit reward of rejected responses",
        "preference/chosen_logprob": "log-prob of chosen responses, nats",
        "preference/rejected_logprob": "log-prob of rejected responses, nats",
        "eval/preference/<name>": "the same on dpo.held_out",
    },
    "Critic": {
        "critic/explained_variance": "1 - var(return - value) / var(return)",
        "critic/loss": "loss of the critic",
        "critic/value": "value before the step, token mean",
        "critic/return": "return that it learns, token mean",
        "critic/error": "|value - return|, token mean",
        "critic/clipped_share": "share of tokens whose value is clipped",
        "critic/<name>": "grad_norm, learning_rate, tokens and optimizer_steps, as for the policy",
        "critic/router/<name>": "load of the critic's experts, as for the policy",
        "critic/ranks/<name>": "its slowest ranks, as for the policy",
    },
    "Agreement of trainer and engines": {
        "logprob_diff/mean": "|trainer - engine| of sampled tokens, nats",
        "logprob_diff/token_max": "the largest such difference",
        "logprob_diff/clipped_share": "share of tokens where it exceeds the clip range",
        "logprob_diff/stale": "the part of the mean that stale weights explain",
        "logprob_diff/router": "the part that different experts explain",
        "logprob_diff/arithmetic": "the rest of the mean",
        "logprob_diff/stale_share": "share of tokens sampled from other weights",
        "logprob_diff/router_flip_share": "share of tokens with different experts in some layer",
        "sync/parity_diff": "|trainer - engine| right after a weight sync, nats, worst engine",
        "sync/parity_typical": "its median over tokens, divided by 1 - p: rounding per logit, nats",
        "sync/parity_overall": "its sum divided by the sum of 1 - p, nats",
        "sync/parity_typical_limit": "sync/parity_typical above which an engine is left out",
        "sync/parity_overall_limit": "sync/parity_overall above which an engine is left out",
    },
    "Experts": {
        "router/aux_loss": "load-balance loss; 1 is perfect balance",
        "router/seq_aux_loss": "load-balance loss per sequence; 1 is perfect balance",
        "router/max_violation": "load of the busiest expert / mean load - 1, mean over layers",
        "router/max_violation_max": "the same in the worst layer",
        "router/idle_share": "share of experts without a token",
        "router/load_entropy": "entropy of the load / log(experts); 1 is perfect balance",
        "router/layer_<i>/<name>": "max_violation, idle_share and load_entropy of one layer",
        "router/replaced_share": "share of tokens whose experts train.router_replay changed",
    },
    "Indexers of sparse attention": {
        "indexer/differing_share": "share of the engine's chosen keys that the trainer leaves out",
        "indexer/loss": "train.indexer_loss without its weight, mean over tokens and layers, nats",
        "indexer/grad_norm": "norm of the indexers' gradient before clipping",
        "indexer/layer_<i>/<name>": "differing_share and loss of one layer",
    },
    "Layers for multi-token prediction": {
        "mtp/loss": "train.mtp_loss without its weight, mean over predictions and layers, nats",
        "mtp/acceptance": "share of predictions that the policy's own best token confirms",
        "mtp/grad_norm": "norm of these layers' gradient before clipping",
    },
    "Drafts of engines that speculate": {
        "drafts/version": "the newest weights that verified drafts since the last step",
        "drafts/pass_share": "share of their passes that checked drafts; the others drew a token",
        "drafts/acceptance": "share of rollout.speculate_tokens that these accepted, per pass",
        "drafts/tokens_per_pass": "tokens that a pass of these drew for a request",
        "drafts/gain": "how many times as fast engines measured drawing with drafts to be",
    },
    "Weight sync": {
        "sync/seconds": "wall time of the weight sync",
        "sync/transfer_seconds": "wall time of its transfer, slowest engine",
        "sync/pause_s": "seconds in which an engine does not generate, worst engine",
        "sync/mib": "MiB received by all engines",
        "sync/saved_mib": "MiB of it that did not travel because it was as before (sync.delta)",
        "sync/trainer_mib": "MiB of it sent by the trainer, the rest by engines to each other",
        "sync/engines_failed": "engines without the weights",
        "sync/engines_verified": "engines whose live parameters were read back (sync.verify)",
        "sync/changed_share": "share of slices that are other bytes than before, worst engine",
    },
    "Time": {
        "time/<phase>": "wall seconds of rollout, reward, teacher, logprobs, train, pause, sync"
        " (with its parity check) or checkpoint",
        "time/step": "wall seconds of the step",
        "recovery/keep_seconds": "of it, to keep the states of trainer and critic (recovery.md)",
        "recovery/kept_bytes": "bytes of these states, over all ranks",
        "recovery/count": "recoveries of lost ranks since the start of the command",
        "recovery/dp": "data-parallel size of the trainer, which run.recovery.min_dp lets shrink",
        "ranks/lag": "seconds of the slowest trainer rank's own work / the median of the others of"
        " its pipeline stage (monitoring.md)",
        "ranks/slowest": "the number of this rank",
        "ranks/lag_in/<phase>": "the same lag in passes that train, and in forward passes alone",
        "ranks/slowest_in/<phase>": "the rank that is slowest there",
        "idle/trainer": "share of the step in which the trainer has no work",
        "engines/lag": "seconds of the slowest engine's tokens / those at the median pace of the"
        " others, at the same load (monitoring.md)",
        "engines/slowest": "the number of this engine",
        "idle/engines": "share of the step in which an engine has no request, mean over engines",
    },
    "Evaluation": {
        "eval/greedy_accuracy": "share of scored greedy responses that are right (rewards.md)",
        "eval/greedy_reward": "mean reward of scored greedy responses, before penalties",
        "eval/prompts": "held-out prompts",
        "eval/reward_errors": "responses, greedy or not, whose reward failed: they are left out",
        "eval/avg_at_<n>": "share of n samples of a prompt that are right, mean over prompts",
        "eval/pass_at_<k>": "unbiased estimate of pass@k, for k = 1 and eval.pass_k",
        "eval/<set>/<name>": "the same of the prompts of one set of eval.sets",
        "eval/prompts_at_<k>": "prompts with at least k scored samples, which it is the mean over",
    },
}
"""Section -> name -> meaning; <...> in a name stands for any text."""

FORMER_NAMES = {
    "sync/": "refit/",
    "time/sync": "time/refit",
    "time/pause": "time/settle",
}
"""Beginnings of names -> those of version 0.1, under which values are kept for one more version."""

_HEAD = """# Metrics

A row of `metrics.jsonl` has `step`, `timestamp` (Unix seconds) and any of the numbers below.
Trackers and Prometheus get the same numbers ([monitoring.md](monitoring.md)). Token means are over
the trained tokens. A number that is not finite is `null`. Step 0 is the evaluation before training.

A row of `samples.jsonl` has `step`, `split` (`train` or `eval`), `prompt_index`, `sample_index`
(the number of the sample among those of its prompt), `prompt`, `response`, `response_len` (in
tokens), `reward`, `ground_truth`, `finish_reason`, `weights` (the versions that drew it) and,
where the reward failed, `reward_error`. `set` names the entry of eval.sets. `parts` are the numbers
that the reward is made of, if there are any, and `advantage` is what all tokens of the sample train
with, if the algorithm has one for a sample. Where prompt or later turns have images,
`images` are the paths of small copies in the run folder; of a video, those of some frames.
The first `log.token_samples` rows of a step have `token_rows`, the sequences that train the sample:
`texts` of the tokens, `trained` spans (start, stop, turn), the engine's `logprobs` of the trained
tokens, `versions` (start, stop, version of the weights) and, beyond 4,096 tokens, `cut`, how many
are left out. An episode also has `turns`, and `detail` where an error
ended it ([agents.md](agents.md)). All files are UTF-8, one JSON object a line, and only
`\\n` ends a line. A lone surrogate, which UTF-8 lacks, is written as a JSON escape.

A run of episodes has `episodes.jsonl`, too, with two rows for each group. The first is written
when the group begins: `step`, `group`, `prompt_index`, `episodes` (how many) and `greedy`. The
second has `step`, `group`, `ends` (a reason for each episode) and, where they were aborted,
`detail`. A resume takes no row back, and adds one with `resumed_after`, the step of its checkpoint.
The first row of a group also has `oldest_open`, the first group that had not ended by then; a
resume reads no rows before it.

`alarms.jsonl` has a row when an alarm begins (`state` is `on`) or is over (`cleared`): `step`,
`timestamp`, `alarm`, `metric`, `value`, `bound`, and `text` with the remedy.

A file of rows that reaches `log.rotate_mib` becomes a segment, `metrics.000001.jsonl` and so on,
and a new file begins. No segment is deleted or written again. All rows, in order, are those of

```bash
cat metrics.0*.jsonl metrics.jsonl
```

`mcore_rl.logs.rows.iter_rows("metrics.jsonl")` yields them too, one at a time. A resume cuts
rows beyond its checkpoint off the end, and reads no more of the files than that.

This page is made from the list in `mcore_rl/logs/names.py`:

```python
from pathlib import Path
from mcore_rl.logs.names import make_document

Path("docs/metrics.md").write_text(make_document())
```
"""


def add_former_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return `metrics` plus the same values under the names of version 0.1 where those differ."""
    former = {
        old + name.removeprefix(new): value
        for name, value in metrics.items()
        for new, old in FORMER_NAMES.items()
        if name.startswith(new)
    }
    return {**metrics, **former}


def find_documented(name: str) -> tuple[str, dict[str, str]] | None:
    """Return the documented name of a metric and what stands for its placeholders; None: unknown.

    router/layer_3/idle_share --> router/layer_<i>/<name>, {"i": "3", "name": "idle_share"}
    """
    for documented, pattern in _list_patterns():
        found = pattern.fullmatch(name)
        if found:
            return documented, found.groupdict()
    return None


@cache
def _list_patterns() -> list[tuple[str, re.Pattern[str]]]:
    """Return each documented name and what it matches, those with the most fixed text first."""
    names = [name for meanings in METRICS.values() for name in meanings]
    names.sort(key=lambda name: (name.count("<"), -len(re.sub("<.*?>", "", name))))
    return [
        (name, re.compile(re.sub(r"<(\w+)>", r"(?P<\1>(?s:.+))", name.replace(".", r"\."))))
        for name in names
    ]


def make_document() -> str:
    """Return docs/metrics.md."""
    parts = [_HEAD]
    for section, meanings in METRICS.items():
        rows = [f"| `{name}` | {_escape(meaning)} |" for name, meaning in meanings.items()]
        parts.append("\n".join([f"## {section}\n", "| metric | meaning |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|")
