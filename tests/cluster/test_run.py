"""How the policy's engines are started; tests/scenarios runs them."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.cluster.engine_specs import (
    find_experts_shape,
    find_indexer_shape,
    make_engine_spec,
)
from mcore_rl.cluster.outliving import Outliving
from mcore_rl.cluster.run import RunProcesses
from mcore_rl.config import (
    Config,
    DriftConfig,
    ModelConfig,
    RolloutConfig,
)
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.rollout.indexer_topk import IndexerTopkShape
from mcore_rl.rollout.request import RoutedExpertsShape
from mcore_rl.weights.hf.config import ModelFacts
from tests.support.engine_keys import KEYS
from tests.support.tiny_models import write_model

LOG = Path("/logs/sglang_0.log")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = write_model("qwen3_moe", tmp_path_factory.mktemp("model"))
    return Config(
        model=ModelConfig(path=str(path), dtype="float32"),
        rollout=RolloutConfig(tp=4, ep=2, max_concurrency=9, deterministic=True),
    )


def spec_of(config: Config, policy: ModelFacts | None = None) -> EngineSpec:
    return make_engine_spec(
        config.model,
        config.rollout,
        config.drift,
        policy or ModelFacts.read(config.model.path),
        LOG,
        KEYS,
        seed=config.run.seed,
    )


FIRST_ARGUMENTS = ("--weight-version", "0", "--disable-shared-experts-fusion")


def test_an_engine_has_the_recipes_sizes_and_weights_of_version_0(config: Config) -> None:
    spec = spec_of(config)
    assert (spec.model_path, spec.log_path) == (config.model.path, str(LOG))
    assert (spec.tp, spec.ep, spec.max_running, spec.dtype) == (4, 2, 9, "float32")
    assert spec.deterministic and spec.routed_experts and not spec.can_release_memory
    assert spec.extra_args == FIRST_ARGUMENTS


@pytest.mark.parametrize("share_prompts", [None, True, False])
def test_the_policys_engines_share_prompts_as_the_recipe_says(
    config: Config, share_prompts: bool | None
) -> None:
    assert config.rollout.share_prompts is None
    asked = replace(config, rollout=replace(config.rollout, share_prompts=share_prompts))
    assert spec_of(asked).share_prompts is share_prompts


def test_options_for_sglang_are_passed_on(config: Config) -> None:
    passed = {"mem_fraction_static": 0.5, "enable_dp_lm_head": True, "cuda_graph_bs_decode": [1, 8]}
    attention_dp = replace(config.rollout, attention_dp=2, sglang=passed)
    spec = spec_of(replace(config, rollout=attention_dp))
    assert spec.extra_args[3:] == (
        *("--mem-fraction-static", "0.5"),
        *("--enable-dp-lm-head",),
        *("--cuda-graph-bs-decode", "1", "8"),
    )


def test_engines_without_weights_of_their_own_start_with_dummy_ones(config: Config) -> None:
    untrained = replace(config, model=replace(config.model, init="random"))
    random = spec_of(untrained)
    assert random.extra_args[3:] == ("--load-format", "dummy")
    fp8 = replace(
        config,
        model=replace(config.model, dtype="bfloat16"),
        rollout=replace(config.rollout, quantization="fp8"),
    )
    *dummy, option, override = spec_of(fp8).extra_args[3:]
    assert dummy == ["--load-format", "dummy"] and option == "--json-model-override-args"
    assert json.loads(override)["quantization_config"]["quant_method"] == "fp8"


@pytest.mark.parametrize("packing", ["int4", "fp8"])
def test_engines_of_a_packed_model_start_without_its_weights(config: Config, packing: Any) -> None:
    """Their weights come from ranks that decode them, in bfloat16."""
    policy = replace(ModelFacts.read(config.model.path), packing=packing)
    assert spec_of(config, policy).extra_args[3:] == (
        *("--load-format", "dummy"),
        *("--json-model-override-args", '{"quantization_config": null}'),
    )


def test_experts_are_reported_where_there_are_any_and_the_recipe_wants_them(
    config: Config, tmp_path: Path
) -> None:
    asked, unasked = DriftConfig(), DriftConfig(routed_experts=False)
    shape = find_experts_shape(asked, ModelFacts.read(config.model.path))
    assert isinstance(shape, RoutedExpertsShape)
    assert any(shape.moe_layers) and 0 < shape.top_k < shape.num_experts
    assert find_experts_shape(unasked, ModelFacts.read(config.model.path)) is None
    dense = ModelFacts.read(write_model("qwen3", tmp_path))
    assert find_experts_shape(asked, dense) is None


def test_chosen_keys_are_reported_where_the_recipe_wants_them() -> None:
    sparse = ModelFacts.read("recipes/model/deepseek_v32")
    assert find_indexer_shape(DriftConfig(), sparse) is None
    assert find_indexer_shape(DriftConfig(indexer_topk=True), sparse) == IndexerTopkShape(61, 2048)


class WatchedGroup:
    """A group of ranks or engines whose loss a test decides."""

    def __init__(self) -> None:
        self.losses: list[Exception] = []

    async def watch(self) -> None:
        while not self.losses:
            await asyncio.sleep(0.01)
        raise self.losses[0]


class Servers:
    def watches(self) -> list[None]:
        return []


Scene = tuple[RunProcesses, WatchedGroup, WatchedGroup]


@pytest.fixture
def scene(config: Config) -> Iterator[Scene]:
    """Return a run's processes, with its trainer and its engines."""
    trainer, engines = WatchedGroup(), WatchedGroup()
    policy = ModelFacts.read(config.model.path)
    groups: Any = (trainer, None, engines, None)
    servers: Any = Servers()
    with closing(EventLoop()) as loop:
        processes = RunProcesses(config, policy, LOG, loop, groups, servers, KEYS, Outliving())
        yield processes, trainer, engines


async def wait_until(is_over: Callable[[], bool]) -> str:
    while not is_over():
        await asyncio.sleep(0.01)
    return "samples"


def test_ranks_that_are_lost_while_engines_sample_are_recovered_meanwhile(scene: Scene) -> None:
    processes, trainer, _ = scene
    recovered: list[Exception] = []

    def recover(error: Exception) -> None:
        trainer.losses.clear()
        recovered.append(error)
        if len(recovered) < 2:
            trainer.losses.append(RuntimeError("the new rank died, too"))

    processes.recovers, processes.recover_beside_sampling = True, recover
    trainer.losses.append(RuntimeError("rank 1 died"))
    found = processes.run_sampling(wait_until(lambda: len(recovered) == 2))
    assert found == "samples"
    assert [str(error) for error in recovered] == ["rank 1 died", "the new rank died, too"]


def test_a_recovery_that_fails_ends_the_sampling_with_its_reason(scene: Scene) -> None:
    processes, trainer, _ = scene
    canceled: list[bool] = []

    async def sample() -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            canceled.append(True)

    def recover(error: Exception) -> None:
        raise RuntimeError("no recovery is left") from error

    processes.recovers, processes.recover_beside_sampling = True, recover
    trainer.losses.append(RuntimeError("rank 1 died"))
    with pytest.raises(RuntimeError, match="no recovery is left"):
        processes.run_sampling(sample())
    processes.event_loop.run(wait_until(lambda: bool(canceled)))


def test_a_lost_engine_ends_the_sampling_and_is_no_matter_of_the_ranks(scene: Scene) -> None:
    processes, _, engines = scene
    recovered: list[Exception] = []
    processes.recovers, processes.recover_beside_sampling = True, recovered.append
    engines.losses.append(RuntimeError("engine 0 died"))
    with pytest.raises(RuntimeError, match="engine 0 died"):
        processes.run_sampling(wait_until(lambda: False))
    assert not recovered


def test_without_a_recovery_beside_it_a_lost_rank_ends_the_sampling(scene: Scene) -> None:
    processes, trainer, _ = scene
    trainer.losses.append(RuntimeError("rank 1 died"))
    with pytest.raises(RuntimeError, match="rank 1 died"):
        processes.run_sampling(wait_until(lambda: False))
