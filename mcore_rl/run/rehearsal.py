"""Turns a recipe for many GPUs into its rehearsal for a laptop.

A rehearsal has the recipe's model family, algorithm and kinds of parallelism in the smallest sizes.
It takes one step with a tiny random model and arithmetic prompts (questions about pictures, if the
model sees images), both made on the spot. Options that this module does not name are kept: loss,
advantage, corrections, router replay, modes of the rollout, the reward function, who shares GPUs
with whom.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_rl.algo.lookup import needs_of
from mcore_rl.config import (
    AgentsConfig,
    ClusterConfig,
    Config,
    CriticConfig,
    OptimizerConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    ServedModelConfig,
    TrainConfig,
)
from mcore_rl.config.tree import list_changes, mappings_under
from mcore_rl.device.upstream import megatron_needs_gpu, server_needs_gpu
from mcore_rl.run.rehearsal_inputs import smallest_servers, with_tiny_sections, write_inputs
from mcore_rl.tasks.arithmetic import vocabulary
from mcore_rl.tasks.tiny_models import SPECIAL_TOKENS
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.qwen_delta_net import LINEAR, SOFTMAX
from mcore_rl.weights.models.settings import read_rope

SMALLEST = 2
"""Size that a rehearsal gives to every kind of parallelism that its recipe uses."""
MOST_RANKS = 4
PROMPTS = 8
SAMPLES = 4
MAX_PROMPT_LEN = 64
MAX_FIRST_CONTEXT_LEN = 256  # of an episode, whose environment adds to the prompt
MAX_RESPONSE_LEN = 16
MAX_TOKENS = 1024
KV_CACHE_LEN = 8192
REWARD_NOISE = 1.0
"""Noise added to rewards (rewards/scorer.py): a random model earns 0 for every response."""
LEARNING_RATE = 1e-3
"""One step at this rate changes log-probs far more than rounding does, so stale engines show."""

TINY: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_topk": 8,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "sliding_window": 32,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "moe_shared_expert_intermediate_size": 64,
    "moe_latent_size": 32,
}
"""Replacements for sizes in config.json; keys that the model lacks are not added."""


TRAIN, HELD_OUT = "train.parquet", "heldout.parquet"
"""Files of prompts among the inputs of a rehearsal."""


def rehearse(config: Config, given: Collection[str] = ()) -> Config:
    """Return the rehearsal of a recipe; write its model, tokenizer and prompts to
    <run.dir>_rehearsal/inputs.

    `given` names the options ("run.steps") set on the command line. run.steps and run.resume among
    them are kept; those that are not are printed.
    """
    folder = Path(f"{config.run.dir}_rehearsal")
    parallel = _smallest_layout(config.parallel)
    critic = _smallest_critic(config.critic) if needs_of(config.algorithm).critic else config.critic
    layers = max(_num_layers(parallel), _num_layers(critic.parallel))
    policy = ModelFacts.read(config.model.path)
    tiny = tiny_config(policy.config, layers, trains_mtp=config.train.mtp_loss > 0)
    inputs = write_inputs(tiny, folder / "inputs")
    max_prompt_len = MAX_FIRST_CONTEXT_LEN if config.agents.is_used else MAX_PROMPT_LEN
    num_gpus = parallel.world_size if config.cluster.colocated else None
    rehearsal = replace(
        config,
        rehearse=False,
        run=_smallest_run(config.run, folder, given, len(config.train.lora.list_adapters())),
        model=replace(config.model, path=str(inputs / "model"), init="random", dtype="float32"),
        parallel=parallel,
        train=_smallest_train(config.train, parallel.etp, inputs),
        critic=critic,
        rollout=_smallest_rollout(config.rollout, num_gpus),
        agents=_smallest_agents(config.agents),
        # Responses of a random model may all be cut off; filtered, they would move no weight.
        algorithm=replace(config.algorithm, filter_overlong=False),
        reward=_smallest_reward(config.reward, config.judge.is_used),
        **_smallest_data(config, inputs, max_prompt_len),
        cluster=_smallest_cluster(config.cluster),
        **smallest_servers(config.sandbox, config.search, inputs),
        sync=replace(config.sync, bucket_mib=min(config.sync.bucket_mib, 1.0)),
        **{role: _smallest_served(served) for role, served in config.served_models.items()},
    )
    _tell(
        list_changes(config, rehearsal, mappings_under(Config)),
        list_changes(config, rehearsal, sorted(set(given) - {"rehearse", "run.dir"})),
    )
    return rehearsal


Changes = Iterable[tuple[str, Any, Any]]
"""Options, with their values in the recipe and in its rehearsal."""


def _tell(upstream: Changes, given: Changes) -> None:
    """Print what the rehearsal does otherwise: `upstream` are options by free names, `given` those
    of the command line.
    """
    print(
        f"in a rehearsal every reward gets a pseudo-random number below {REWARD_NOISE:g}, and"
        f" optimizers step at {LEARNING_RATE:g}, so that a random model learns something",
        file=sys.stderr,
    )
    left_out = [
        f"{group}.{name}"
        for group, before, after in upstream
        for name in before
        if name not in after
    ]
    if left_out:
        print(f"a rehearsal leaves out what needs a GPU: {', '.join(left_out)}", file=sys.stderr)
    for name, before, after in given:
        print(f"rehearsed with {name}={after}, not {before}", file=sys.stderr)


def _smallest_data(config: Config, inputs: Path, max_prompt_len: int) -> dict[str, Any]:
    """Take the prompts in `inputs`; adapters that take turns have them as their own."""
    data = config.data.reduce_to(str(inputs / TRAIN), max_prompt_len)
    evaluation = config.eval.reduce_to(str(inputs / HELD_OUT), PROMPTS)
    if config.train.lora.adapters:
        data, evaluation = replace(data, train=[]), replace(evaluation, data=[])
    return {"data": data, "eval": evaluation}


def _smallest_run(
    run: RunConfig, folder: Path, given: Collection[str], num_turns: int
) -> RunConfig:
    """Take a step for each adapter; steps and resumption that are `given` on the command line
    stay.
    """
    steps = run.steps if "run.steps" in given else num_turns
    resume = run.resume and "run.resume" in given
    return replace(run, dir=str(folder), steps=steps, epochs=None, resume=resume)


def _set_learning_rate(optimizer: OptimizerConfig) -> OptimizerConfig:
    return replace(optimizer, lr=LEARNING_RATE, warmup_steps=0)


def _smallest(size: int) -> int:
    return min(size, SMALLEST)


def _smallest_layout(layout: ParallelConfig) -> ParallelConfig:
    """Reduce sizes above 1 to 2, and data parallelism to 1 where 2 exceeds MOST_RANKS ranks."""
    smallest = ParallelConfig(
        tp=_smallest(layout.tp),
        pp=_smallest(layout.pp),
        vpp=layout.vpp and SMALLEST,
        cp=_smallest(layout.cp),
        ep=_smallest(layout.ep),
        etp=_smallest(layout.etp),
        stage_layers=_smallest_stages(layout),
    )
    if layout.dp_size == 1 or smallest.dp_size > 1 or smallest.world_size >= MOST_RANKS:
        return smallest
    return replace(smallest, dp=SMALLEST)


def _num_layers(layout: ParallelConfig) -> int:
    """Return the number of layers: two for each model chunk, unless stages are uneven."""
    return sum(layout.stage_layers) or 2 * layout.pp * (layout.vpp or 1)


def _smallest_stages(layout: ParallelConfig) -> list[int]:
    """Return two layers for each model chunk and one for the last; [] unless stages are uneven."""
    if len(set(layout.stage_layers)) < 2:
        return []
    num_chunks = SMALLEST * (SMALLEST if layout.vpp else 1)
    return [2] * (num_chunks - 1) + [1]


def _smallest_cluster(cluster: ClusterConfig) -> ClusterConfig:
    store_mib = 128 if cluster.address is None else None
    return replace(cluster, gpus=None, cpus_per_rank=0.1, object_store_mib=store_mib)


def _smallest_train(train: TrainConfig, etp: int, inputs: Path) -> TrainConfig:
    # A tiny model's ranks have less than a block of 128 x 128, and half a group of INT4 each if two
    # share an expert.
    keeps_groups = train.fake_quantization == "int4" and etp == 1
    prompts = {"data": [str(inputs / TRAIN)], "eval": [str(inputs / HELD_OUT)], "path": ""}
    adapters = [replace(own, **prompts) for own in train.lora.adapters]
    return replace(
        train,
        fake_quantization="int4" if keeps_groups else "none",
        lora=replace(train.lora, adapters=adapters),
        max_tokens_per_microbatch=MAX_TOKENS,
        mini_batches=min(train.mini_batches, SMALLEST),
        optimizer=_set_learning_rate(train.optimizer),
        megatron=_without_gpu(train.megatron, megatron_needs_gpu),
    )


def _without_gpu(
    options: Mapping[str, Any], needs_gpu: Callable[[str, object], bool]
) -> dict[str, Any]:
    """Return the options of an upstream class that work without a GPU."""
    return {name: value for name, value in options.items() if not needs_gpu(name, value)}


def _smallest_rollout(rollout: RolloutConfig, num_gpus: int | None) -> RolloutConfig:
    """Shrink the engines; `num_gpus` are the trainer's if the engines share them, else None."""
    is_group = rollout.samples_per_prompt > 1
    return replace(
        _smallest_engines(rollout, num_gpus),
        prompts_per_step=PROMPTS if is_group else PROMPTS * SAMPLES,
        samples_per_prompt=SAMPLES if is_group else 1,
        max_response_len=MAX_RESPONSE_LEN,
        max_in_flight=0,
        kv_cache_len=KV_CACHE_LEN,
    )


def _smallest_agents(agents: AgentsConfig) -> AgentsConfig:
    if not agents.is_used:
        return agents
    return replace(agents, max_turn_len=min(agents.max_turn_len, MAX_RESPONSE_LEN), workers=1)


def _smallest_reward(reward: RewardConfig, has_judge: bool) -> RewardConfig:
    # A random model gives no verdict, and arithmetic prompts have no tests of programs.
    if has_judge or _checks_programs(reward):
        reward = replace(reward, on_error="value", error_value=0.0, max_failed_share=1.0)
    return replace(
        reward,
        workers=min(reward.workers, 1),
        overlong_buffer_len=min(reward.overlong_buffer_len, MAX_RESPONSE_LEN // 2),
        noise=REWARD_NOISE,
    )


def _checks_programs(reward: RewardConfig) -> bool:
    """Return whether the recipe's own function is made of those that run programs."""
    file = Path(reward.path.partition(":")[0])
    return file.is_file() and "mcore_rl.rewards.code" in file.read_text()


def _smallest_critic(critic: CriticConfig) -> CriticConfig:
    return replace(
        critic,
        path="",
        parallel=_smallest_layout(critic.parallel),
        mini_batches=min(critic.mini_batches, SMALLEST),
        warmup_steps=0,
        optimizer=_set_learning_rate(critic.optimizer),
        megatron=_without_gpu(critic.megatron, megatron_needs_gpu),
    )


def _smallest_engines(rollout: RolloutConfig, num_gpus: int | None) -> RolloutConfig:
    """Shrink the layout of engines; `num_gpus` is as in _smallest_rollout."""
    engine_ranks = _smallest(rollout.tp) * _smallest(rollout.pp)
    room = SMALLEST if num_gpus is None else num_gpus // engine_ranks
    return replace(
        rollout,
        engines=min(_smallest(rollout.engines), room),
        tp=_smallest(rollout.tp),
        ep=_smallest(rollout.ep),
        pp=_smallest(rollout.pp),
        attention_dp=_smallest(rollout.attention_dp),
        nodes_per_engine=0,
        quantization="none",
        compiled=False,  # a rehearsal is of SGLang's own layers
        sglang=_without_gpu(rollout.sglang, server_needs_gpu),
    )


def _smallest_served(model: ServedModelConfig) -> ServedModelConfig:
    """Shrink a served model's engines; a model at a url has none and stays as it is."""
    sglang = _without_gpu(model.sglang, server_needs_gpu)
    return replace(model, engines=1, tp=1, ep=1, pp=1, kv_cache_len=KV_CACHE_LEN, sglang=sglang)


ROTATED = 8
"""Numbers of a head that three axes rotate, at least."""


def tiny_config(
    hf_config: Mapping[str, Any], num_layers: int, *, trains_mtp: bool = False
) -> dict[str, Any]:
    """Return config.json of a tiny model of this family: `num_layers` layers, at most one dense.

    A hybrid model has as many layers of each of its kinds. `trains_mtp`: the model's layers for
    multi-token prediction stay.
    """
    tiny = {key: TINY[key] if key in TINY and value else value for key, value in hf_config.items()}
    tiny |= {
        "vocab_size": len(vocabulary()),
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": trains_mtp * (hf_config.get("num_nextn_predict_layers") or 0),
    }
    if hf_config.get("num_key_value_heads") == hf_config["num_attention_heads"]:
        tiny["num_key_value_heads"] = tiny["num_attention_heads"]
    if (hf_config.get("n_group") or 1) > 1:
        experts_per_group = hf_config["num_experts_per_tok"] // hf_config["topk_group"]
        tiny |= {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 2 * experts_per_group}
    if hf_config.get("first_k_dense_replace"):
        tiny["first_k_dense_replace"] = 1
    if hf_config.get("layer_types"):
        kinds = list(hf_config["layer_types"])
        if LINEAR in kinds:  # in turns, as full_attention_interval says
            kinds = [LINEAR, SOFTMAX] * num_layers
        tiny["layer_types"] = kinds[:num_layers]
    for key in ("mlp_layer_types", "indexer_types"):  # which follow from other keys
        tiny.pop(key, None)
    if hf_config.get("hybrid_override_pattern"):
        pattern = "".join(dict.fromkeys(hf_config["hybrid_override_pattern"])) * num_layers
        tiny |= {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
        tiny.pop("layers_block_type", None)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        tiny[key] = SPECIAL_TOKENS.index("<|pad|>" if key.startswith("pad") else "<|end|>")
    tiny["torch_dtype"] = "float32"
    section = read_rope(hf_config).get("mrope_section")
    if not section:
        return tiny
    if tiny.get("head_dim"):  # three axes share what is rotated of it
        share = family_of(hf_config).rotary_share(hf_config)
        tiny["head_dim"] = max(tiny["head_dim"], int(ROTATED / share))
    return with_tiny_sections(tiny, section)
