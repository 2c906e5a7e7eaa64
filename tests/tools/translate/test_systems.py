"""Each system is read and translated by its own rules."""

from pathlib import Path

import pytest

from mcore_rl.config.recipe import load_recipe
from mcore_rl.tools.translate.command import NAMES
from mcore_rl.tools.translate.systems import SYSTEMS, complete, write_recipe
from tests.tools.translate.accounts import decided, values


def test_the_command_names_all_systems() -> None:
    assert tuple(SYSTEMS) == NAMES


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("verl", ["data.train_batch_size=48"]),
        ("slime", ["--rollout-batch-size", "48"]),
        ("nemo-rl", ["grpo.num_prompts_per_step=48"]),
    ],
)
def test_options_of_each_system_are_read_and_translated(name: str, arguments: list[str]) -> None:
    system = SYSTEMS[name]
    translation = system.translate(system.read(arguments))
    assert values(translation)["rollout.prompts_per_step"] == 48


TOO_FEW = {
    "verl": [
        "data.max_prompt_length=1024",
        "data.max_response_length=3072",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2000",
    ],
    "slime": [
        *("--rollout-max-prompt-len", "1024", "--rollout-max-response-len", "3072"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "2000"),
    ],
    "nemo-rl": [
        "policy.max_total_sequence_length=4096",
        "policy.sequence_packing.enabled=true",
        "policy.sequence_packing.train_mb_tokens=2000",
    ],
}
"""A micro-batch that does not hold the longest sequence, which the others cut or leave alone."""


@pytest.mark.parametrize("name", TOO_FEW)
def test_a_micro_batch_holds_the_longest_sequence(name: str) -> None:
    system = SYSTEMS[name]
    translation = complete(system.translate(system.read(TOO_FEW[name])))
    assert values(translation)["train.max_tokens_per_microbatch"] == 4096
    source = next(word for word in TOO_FEW[name] if "tokens" in word or "max_token" in word)
    [told] = [d for d in translation.decisions if d.source == source.partition("=")[0]]
    assert told.value == 2000 and "has to hold the longest sequence" in told.advice


@pytest.mark.parametrize(
    ("prompt", "response", "cache_len"),
    [(1024, 3072, None), (100_000, 3072, 103_072), (None, 65536, 66048)],
)
def test_an_engines_cache_holds_the_longest_sequence(
    prompt: int | None, response: int, cache_len: int | None
) -> None:
    system = SYSTEMS["slime"]
    lens = ["--rollout-max-response-len", str(response)]
    lens += [] if prompt is None else ["--rollout-max-prompt-len", str(prompt)]
    translation = complete(system.translate(system.read(lens)))
    assert values(translation).get("rollout.kv_cache_len") == cache_len


def test_micro_batches_of_so_many_sequences_have_room_for_the_longest() -> None:
    system = SYSTEMS["slime"]
    given = ["--rollout-max-response-len", "3072", "--rollout-max-prompt-len", "1024"]
    translation = system.translate(system.read([*given, "--micro-batch-size", "2"]))
    assert values(translation)["train.max_tokens_per_microbatch"] == 8192
    assert "--micro-batch-size" not in decided(translation)


OFFLOADED = {
    "verl": [
        "actor_rollout_ref.actor.strategy=megatron",
        "+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True",
        "+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=1",
    ],
    "slime": [
        *("--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d"),
        *("--n-samples-per-prompt", "8"),
    ],
    "nemo-rl": [
        "policy.megatron_cfg.enabled=true",
        "policy.megatron_cfg.optimizer.optimizer_cpu_offload=true",
        "policy.megatron_cfg.optimizer.use_precision_aware_optimizer=false",
    ],
}


@pytest.mark.parametrize("name", OFFLOADED)
def test_an_optimizer_that_was_in_host_memory_takes_less_on_the_gpu(name: str) -> None:
    system = SYSTEMS[name]
    translation = complete(system.translate(system.read(OFFLOADED[name])))
    found = values(translation)
    group = "train.optimizer.megatron"
    assert found[f"{group}.use_precision_aware_optimizer"] is True
    assert found[f"{group}.exp_avg_dtype"] == found[f"{group}.exp_avg_sq_dtype"] == "bfloat16"
    names = [w.partition("=")[0].lstrip("+") for w in OFFLOADED[name] if "offload" in w]
    told = {d.source: d.advice for d in translation.decisions}
    assert all("moments in bfloat16" in told[option] for option in names)
    assert "a recipe refuses" not in str(told)


def test_moments_stay_in_float32_where_nobody_asked_for_host_memory() -> None:
    system = SYSTEMS["slime"]
    found = values(complete(system.translate(system.read(["--lr", "1e-6"]))))
    assert found["train.optimizer.megatron.exp_avg_dtype"] == "float32"


GROUPS = {
    "verl": ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n={}"),
    "slime": ("--n-samples-per-prompt={}",),
    "nemo-rl": ("grpo.num_generations_per_prompt={}",),
}
"""How many samples of a prompt an advantage compares with one another."""


@pytest.mark.parametrize("name", GROUPS)
def test_a_sample_that_is_alone_with_its_prompt_is_to_be_decided_on(name: str) -> None:
    system = SYSTEMS[name]
    source = GROUPS[name][-1].partition("=")[0]
    for number, expected in ((1, [True]), (8, [])):
        words = [word.format(number) for word in GROUPS[name]]
        translation = complete(system.translate(system.read(words)))
        refusals = [d for d in translation.decisions if "a recipe refuses it" in d.advice]
        assert [source in d.source.split(", ") for d in refusals] == expected
        assert all("rollout.samples_per_prompt=1: it compares" in d.advice for d in refusals)


@pytest.mark.parametrize(
    ("words", "is_told"),
    [(["--rollout-num-gpus", "8"], True), (["--colocate"], False)],
)
def test_engines_hold_their_weights_once(words: list[str], is_told: bool) -> None:
    system = SYSTEMS["slime"]
    translation = complete(system.translate(system.read(words)))
    assert values(translation)["rollout.stage_weights"] is False
    assert ("weights of engines" in decided(translation)) == is_told


def test_a_recipe_with_factors_is_taken_with_the_file_of_its_gpus(tmp_path: Path) -> None:
    words = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.rollout.n=8"]
    system = SYSTEMS["verl"]
    file = tmp_path / "made.yaml"
    file.write_text(write_recipe(complete(system.translate(system.read(words))), "made"))
    config = load_recipe(str(file), [])
    assert config.train.lora.rank == 8 and config.train.ddp["overlap_grad_reduce"] is False
