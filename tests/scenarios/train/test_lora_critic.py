"""A critic with low-rank factors: values, gradients, steps, checkpoints and kept states."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.func import functional_call

from checkpoint_tools.cli import main
from mcore_rl.algo.values import value_loss
from mcore_rl.config import (
    Config,
    CriticConfig,
    CriticLoraConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from mcore_rl.planning.adapter_memory import list_frozen_critic_bytes
from mcore_rl.planning.kept_state import predict_kept_states
from mcore_rl.planning.memory import predict_critic
from mcore_rl.planning.recipe_models import PlannedRun, make_critic_training
from mcore_rl.process.kept_memory import HEADER_BYTES, KeptMemory
from mcore_rl.train.actor import Actor
from mcore_rl.train.checkpoint_check import read_places_of
from mcore_rl.train.critic import CriticModel
from mcore_rl.train.lora.frozen import ALONE, BaseSharing
from mcore_rl.train.offload import TRAINING, WEIGHTS, _gradients
from mcore_rl.train.recovery.rank_state import SMALL_BYTES
from mcore_rl.train.runtime import init_distributed
from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.lora.targets import list_targets
from tests.scenarios.train.test_lora import adapt, check_gradients, draw, named_factors, to_modules
from tests.support.distributed import run_each, run_ranks
from tests.support.gradients import gather_gradients
from tests.support.optimizer_layouts import name_of, read
from tests.support.tiny_training import NUM_TOKENS, my_batches, write_hf_model
from tests.train.test_critic import batches, transformers_values

RANK, ALPHA = 4, 10.0
LORA = CriticLoraConfig(rank=RANK, alpha=ALPHA)
HEAD = "output_layer.weight"
CLIP = 0.2
LAYOUTS: list[dict[str, Any]] = [{"tp": 2, "ep": 2}, {"pp": 2}, {"dp": 2, "ep": 1}]


def make_critic(
    rank: int,
    world_size: int,
    port: int,
    path: str,
    layout: dict[str, Any],
    sharing: BaseSharing = ALONE,
) -> CriticModel:
    parallel = ParallelConfig(**layout)
    init_distributed(rank, world_size, "127.0.0.1", port, parallel, seed=0, timeout_s=60)
    # A critic with factors leaves its routers alone, whatever the policy does with its own.
    train = TrainConfig(router_aux_loss_coef=0.1, router_bias_rate=0.1)
    train = make_critic_training(train, CriticConfig(lora=LORA))
    optimizer = OptimizerConfig(lr=1e-3, clip_grad=0.0)
    return CriticModel(ModelConfig(path=path), parallel, train, optimizer, 6, 0, sharing)


def make_lender(path: str, layout: dict[str, Any]) -> Actor:
    """Return a policy that lets others map the weights below its factors."""
    train = TrainConfig(lora=LoraConfig(rank=2, experts=False))
    parts = ModelConfig(path=path), ParallelConfig(**layout), train, OptimizerConfig()
    return Actor(*parts, 6, 0, BaseSharing(lends=True))


def start(rank: int, world_size: int, port: int, path: str, layout: dict[str, Any]) -> CriticModel:
    """Return a critic whose factors and value head are all different from 0."""
    critic = make_critic(rank, world_size, port, path, layout)
    with torch.no_grad():
        for name, factor in named_factors(critic).items():
            factor.copy_(draw(name, tuple(factor.shape)))
        for head in find_head(critic).values():
            head.copy_(draw(HEAD, tuple(head.shape)))
    assert critic._adapter is not None
    critic._adapter.merge()
    critic.optimizer.reload_model_params()
    return critic


def find_head(critic: CriticModel) -> dict[str, Any]:
    parameters = [p for chunk in critic.chunks for p in unwrap_model(chunk).named_parameters()]
    return {name: parameter for name, parameter in parameters if name == HEAD}


def step(critic: CriticModel) -> Any:
    loss = partial(value_loss, clip=CLIP)
    return critic.train_step(my_batches(batches()), loss, num_tokens=NUM_TOKENS)


def measure(critic: CriticModel) -> tuple[int, int, int, int]:
    """Return the bytes of weights, gradients and optimizer on the device, and W0 on the host."""
    assert critic._adapter is not None
    critic.hold({WEIGHTS})
    weights = critic.held_bytes
    critic.hold({WEIGHTS, TRAINING})
    gradients = sum(gradient.nbytes for gradient in _gradients(critic.chunks))
    optimizer = critic.held_bytes - weights - gradients
    return (
        weights,
        gradients,
        optimizer,
        sum(b.nbytes for b in critic._adapter.frozen.copies.values()),
    )


def take_steps(
    rank: int, world_size: int, port: int, path: str, root: Path, layout: dict[str, Any]
) -> Any:
    """Return values before, gradients of the first of two steps, stats, and bytes."""
    critic = start(rank, world_size, port, path, layout)
    folder = root / name_of(layout)
    critic.export_hf(folder / "start")
    values = critic.compute_values(my_batches(batches()))
    stats = [step(critic)]
    gather_gradients(critic)
    trained = {**named_factors(critic), **find_head(critic)}
    gradients = {name: parameter.main_grad.clone() for name, parameter in trained.items()}
    critic.save(folder / "checkpoint", {})
    critic.finish_save()
    critic.export_hf(folder / "stepped")
    stats.append(step(critic))
    critic.export_hf(folder / "last")
    return values, gradients, stats, measure(critic)


def resume(
    rank: int, world_size: int, port: int, path: str, root: Path, saved: str, layout: Any
) -> None:
    """Take the last step from a checkpoint, with frozen weights that a policy lends."""
    init_distributed(
        rank, world_size, "127.0.0.1", port, ParallelConfig(**layout), seed=0, timeout_s=60
    )
    actor = make_lender(path, layout)
    sharing = BaseSharing(borrowed=actor.frozen_path)
    critic = make_critic(rank, world_size, port, path, layout, sharing)
    assert actor._adapter is not None and critic._adapter is not None
    lent, frozen = actor._adapter.frozen, critic._adapter.frozen
    for name, copy in frozen.copies.items():
        assert (name in lent.copies) == (".experts." not in name), name
        if name in lent.copies:
            assert torch.equal(copy, lent.copies[name])
    experts = [copy.nbytes for name, copy in frozen.copies.items() if ".experts." in name]
    assert frozen.own_bytes == sum(experts) > 0
    critic.load(root / saved / "checkpoint")
    step(critic)
    critic.export_hf(root / f"{saved}_in_{name_of(layout)}")


def find_gradients(model_dir: Path) -> dict[str, Tensor]:
    """Return the gradients of factors and head by autograd through transformers, in float64."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, **options)
    weights = {name: value.double() for name, value in read(model_dir).items()}
    trained = {HEAD: draw(HEAD, (1, model.config.hidden_size)).double().requires_grad_()}
    for name in list_targets(read_hf_config(model_dir), []):
        out_size, in_size = weights[name].shape
        for key, shape in ((f"{name}.A", (RANK, in_size)), (f"{name}.B", (out_size, RANK))):
            trained[key] = draw(key, shape).double().requires_grad_()
    factors = {key: value for key, value in trained.items() if key != HEAD}
    parameters = to_modules(adapt(weights, factors), model)
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches():
        values_N = []
        for ids in batch.token_ids_T.split(list(batch.lens_N)):
            out = functional_call(model, parameters, (ids[None],), {"output_hidden_states": True})
            values_N.append((out.hidden_states[-1][0] @ trained[HEAD].T)[:, 0].roll(1))
        loss_T, _ = value_loss(torch.cat(values_N), batch, clip=CLIP)
        assert batch.loss_weights_T is not None
        total = total + (loss_T * batch.loss_weights_T).sum()
    total.backward()
    return {key: value.grad for key, value in trained.items() if value.grad is not None}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_hf_model(tmp_path_factory.mktemp("lora_critic") / "model"))


@pytest.fixture(scope="module")
def one_process(path: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    root = tmp_path_factory.mktemp("steps")
    return root, run_ranks(take_steps, 1, path, root, {})[0]


@pytest.fixture(scope="module")
def wanted(path: str) -> dict[str, Tensor]:
    return find_gradients(Path(path))


def test_values_and_gradients_are_those_of_transformers(
    one_process: tuple[Path, Any], wanted: dict[str, Tensor]
) -> None:
    root, (values, gradients, *_) = one_process
    assert gradients.keys() == wanted.keys()
    check_gradients(gradients, wanted, "one process", most=2e-6)
    for got, want in zip(values, transformers_values(root / "one" / "start"), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_a_checkpoint_holds_factors_and_the_value_head_alone(
    one_process: tuple[Path, Any],
) -> None:
    root, (_, gradients, *_) = one_process
    keys = {key for key, _ in read_places_of(root / "one" / "checkpoint")}
    model_keys = {key for key in keys if not key.startswith(("optimizer", "rng", "extra"))}
    assert {key for key in model_keys if key in gradients or key.startswith("lora.")} == {
        HEAD if name == HEAD else f"lora.{name}" for name in gradients
    }
    assert not any("word_embeddings" in key or "linear_" in key for key in model_keys)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(LAYOUTS[:1], id="experts"),
        pytest.param(LAYOUTS[1:], id="further"),
    ],
)
def test_layouts_agree_and_resume_in_each_other(
    path: str,
    one_process: tuple[Path, Any],
    wanted: dict[str, Tensor],
    layouts: list[dict[str, Any]],
) -> None:
    root, (_, _, stats, _) = one_process
    last = read(root / "one" / "last")
    run = PlannedRun.make(make_recipe(path))
    for layout, results in zip(layouts, run_each(take_steps, 2, layouts, path, root), strict=True):
        held = set()
        for rank, (_, gradients, _, measured) in enumerate(results):
            check_gradients(gradients, wanted, layout, most=2e-6)
            held |= gradients.keys()
            check_bytes(run, layout, rank if layout.get("pp") else 0, measured)
        assert held == wanted.keys(), layout
        own = next(own for _, _, own, _ in results if own[0] is not None)
        for got, want in zip(own, stats, strict=True):
            assert got.loss == pytest.approx(want.loss, abs=1e-6), layout
        check_weights(read(root / name_of(layout) / "last"), last, layout)
    first = name_of(layouts[0])
    run_ranks(resume, 1, path, root, first, {})
    check_weights(read(root / f"{first}_in_one"), last, "resumed")


def test_a_checkpoint_merges_into_the_exported_critic(
    path: str, one_process: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = one_process
    saved, source = str(root / "one" / "checkpoint"), ["--source-hf", path]
    assert main(["merge-lora", saved, str(tmp_path / "merged"), *source]) == 0
    merged, export = read(tmp_path / "merged"), read(root / "one" / "stepped")
    assert merged.keys() == export.keys()
    for name, value in export.items():
        torch.testing.assert_close(merged[name], value, rtol=0, atol=1e-6)
    assert transformers_values(tmp_path / "merged")[0].abs().max() > 1e-3
    assert main(["to-hf", saved, str(tmp_path / "never"), "--lora", *source]) == 2
    assert "is a critic's, with a value head" in capsys.readouterr().err


def make_recipe(path: str, **layout: Any) -> Config:
    config = Config(model=ModelConfig(path=path))
    config.algorithm.advantage = "gae"
    config.critic = CriticConfig(parallel=ParallelConfig(**layout), lora=LORA)
    return config


def check_bytes(run: PlannedRun, layout: dict[str, Any], stage: int, measured: Any) -> None:
    """Compare what a rank holds with the plan; frozen weights on the host exactly."""
    assert run.critic is not None
    own = replace(run, critic=replace(run.critic, parallel=ParallelConfig(**layout)))
    uses = predict_critic(own)[stage]
    weights, gradients, optimizer, frozen = measured
    assert uses["weights"] == pytest.approx(weights, rel=0.01), layout
    assert uses["optimizer"] == pytest.approx(optimizer, rel=0.02), layout
    assert uses["gradients"] >= gradients, layout
    assert list_frozen_critic_bytes(own)[stage] == frozen, layout


def check_weights(got: dict[str, Tensor], wanted: dict[str, Tensor], where: object) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (got[name] - value).abs().max().item() <= 1e-5, (where, name)


def go_back(rank: int, world_size: int, port: int, path: str, root: Path) -> int:
    """Take a second step twice; return the bytes of a kept state."""
    critic = start(rank, world_size, port, path, {})
    memory = KeptMemory()
    critic.use_kept_memory([memory.reserve(f"{k}", critic.kept_state_bytes) for k in range(2)])
    step(critic)
    critic.keep_state(1)
    step(critic)
    critic.export_hf(root / "once")
    critic.restore_state(1)
    step(critic)
    critic.export_hf(root / "twice")
    memory.close()
    return critic.kept_state_bytes


def test_a_state_in_memory_comes_back(path: str, tmp_path: Path) -> None:
    [num_bytes] = run_ranks(go_back, 1, path, tmp_path)
    config = make_recipe(path)
    _, kept = predict_kept_states(PlannedRun.make(config), config.run.recovery)
    assert num_bytes - HEADER_BYTES - SMALL_BYTES == pytest.approx(kept.rank_bytes, rel=0.02)
    once, twice = (read(tmp_path / name) for name in ("once", "twice"))
    assert all(torch.equal(twice[name], value) for name, value in once.items())
