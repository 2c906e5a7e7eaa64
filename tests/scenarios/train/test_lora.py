"""Low-rank factors: their gradients, steps and checkpoints in every layout, and the export."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.func import functional_call

from mcore_rl.config import (
    Config,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from mcore_rl.planning.kept_state import predict_kept_states
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.process.kept_memory import HEADER_BYTES, KeptMemory
from mcore_rl.train.actor import Actor
from mcore_rl.train.recovery.rank_state import SMALL_BYTES
from mcore_rl.train.trained_model import TrainedModel
from mcore_rl.types import LogprobOptions
from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.lora.product import add_product
from mcore_rl.weights.lora.targets import list_targets
from tests.support.distributed import run_each, run_ranks
from tests.support.gradients import gather_gradients
from tests.support.optimizer_layouts import name_of, read
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    make_batches,
    my_batches,
    token_loss,
    write_hf_model,
)

RANK, ALPHA = 4, 10.0
SCALE = ALPHA / RANK
LORA = LoraConfig(rank=RANK, alpha=ALPHA)
NO_BALANCE = {"router_aux_loss_coef": 0.0}
OPTIMIZER = OptimizerConfig(lr=1e-3, clip_grad=0.0)
CASES = [
    pytest.param([{"tp": 2, "ep": 2}, {"dp": 2, "ep": 1}], (1, {}, "tp2_ep2"), id="experts"),
    pytest.param(
        [
            {"tp": 2},
            {"tp": 2, "etp": 2},
            {"ep": 2},
            {"pp": 2, "vpp": 2},
            {"cp": 2},
        ],
        (2, {"tp": 2, "etp": 2}, "pp2_vpp2"),
        id="further",
        marks=pytest.mark.slow,
    ),
]
"""(layouts, (number of ranks, layout, whose checkpoint these resume))"""


def draw(name: str, shape: tuple[int, ...]) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def named_factors(actor: TrainedModel) -> dict[str, Any]:
    return {
        f"{target.name}.{letter}": factor
        for chunk in actor.chunks
        for target, *factors in unwrap_model(chunk).lora.list_pairs()
        for letter, factor in zip("AB", factors, strict=True)
    }


def start(rank: int, world_size: int, port: int, model: ModelConfig, layout: Any) -> Actor:
    """Return an actor whose factors are all different from 0."""
    options = {"lora": LORA, **NO_BALANCE}
    if layout.get("pp"):
        options["recompute"] = "full"
    actor = make_actor(
        rank, world_size, port, model, ParallelConfig(**layout), OPTIMIZER, **options
    )
    with torch.no_grad():
        for name, factor in named_factors(actor).items():
            factor.copy_(draw(name, tuple(factor.shape)))
    assert actor._adapter is not None
    actor._adapter.merge()
    actor.optimizer.reload_model_params()
    return actor


def step(actor: Actor) -> Any:
    return actor.train_step(my_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)


def take_steps(
    rank: int, world_size: int, port: int, model: ModelConfig, root: Path, layout: Any
) -> Any:
    """Return stats, and gradients of the first of three steps; weights lie in `root`."""
    actor = start(rank, world_size, port, model, layout)
    folder = root / name_of(layout)
    actor.export_hf(folder / "start")
    reference = actor.compute_logprobs(
        my_batches(), LogprobOptions(temperature=1.0, reference=True)
    )
    stats = [step(actor)]
    gather_gradients(actor)
    gradients = {name: f.main_grad.clone() for name, f in named_factors(actor).items()}
    actor.save(folder / "checkpoint", {})
    stats += [step(actor), step(actor)]
    actor.finish_save()
    actor.export_hf(folder / "last")
    return gradients, stats, reference


def resume(
    rank: int, world_size: int, port: int, model: ModelConfig, root: Path, layout: Any, saved: str
) -> None:
    """Take the last two steps from a checkpoint of another layout."""
    options = {"lora": LORA, **NO_BALANCE}
    parallel = ParallelConfig(**layout)
    actor = make_actor(rank, world_size, port, model, parallel, OPTIMIZER, **options)
    actor.load(root / saved / "checkpoint")
    for _ in range(2):
        step(actor)
    actor.export_hf(root / f"{saved}_in_{name_of(layout)}")


def adapt(weights: dict[str, Tensor], factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with the products of the factors added."""
    adapted = dict(weights)
    for name in {key.rpartition(".")[0] for key in factors}:
        adapted[name] = weights[name] + SCALE * factors[f"{name}.B"] @ factors[f"{name}.A"]
    return adapted


def to_modules(weights: dict[str, Tensor], model: torch.nn.Module) -> dict[str, Tensor]:
    """Return transformers' parameters, in which the experts of a layer are one tensor."""
    made = {}
    for name, parameter in model.named_parameters():
        if name in weights:
            made[name] = weights[name]
            continue
        prefix, _, kind = name.rpartition(".")
        halves = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
        made[name] = torch.stack(
            [
                torch.cat([weights[f"{prefix}.{expert}.{half}.weight"] for half in halves])
                for expert in range(parameter.shape[0])
            ]
        )
    return made


def compute_loss(model: Any, parameters: dict[str, Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for batch in make_batches():
        first = 0
        for ids in batch.token_ids_T.split(list(batch.lens_N)):
            rows = slice(first, first + len(ids))
            first += len(ids)
            logits = functional_call(model, parameters, (ids[None],)).logits[0, :-1]
            log_probs = logits.log_softmax(-1)
            logprobs = log_probs.gather(-1, ids[1:, None])[:, 0]
            entropy = -(log_probs.exp() * log_probs).sum(-1)
            mask, advantages, weights = (
                value[rows][1:]  # type: ignore[index]
                for value in (batch.loss_mask_T, batch.advantages_T, batch.loss_weights_T)
            )
            whole = torch.where(mask, logprobs, 0.0).sum().detach()  # as token_loss gets it
            loss = (0.001 * whole - advantages) * logprobs - 0.01 * entropy
            total = total + (loss * weights).sum()
    return total


def find_gradients(model_dir: Path) -> dict[str, Tensor]:
    """Return the gradients of the factors by autograd through transformers, in float64."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(model_dir, **options)
    weights = {name: value.double() for name, value in read(model_dir).items()}
    factors = {}
    for name in list_targets(read_hf_config(model_dir), []):
        out_size, in_size = weights[name].shape
        for letter, shape in (("A", (RANK, in_size)), ("B", (out_size, RANK))):
            key = f"{name}.{letter}"
            factors[key] = draw(key, shape).double().requires_grad_()
    compute_loss(model, to_modules(adapt(weights, factors), model)).backward()
    gradients = {}
    for key, factor in factors.items():
        assert factor.grad is not None, key
        gradients[key] = factor.grad
    return gradients


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(path=str(write_hf_model(tmp_path_factory.mktemp("lora") / "model")))


@pytest.fixture(scope="module")
def one_process(model: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    root = tmp_path_factory.mktemp("steps")
    return root, run_ranks(take_steps, 1, model, root, {})[0]


@pytest.fixture(scope="module")
def wanted(model: ModelConfig) -> dict[str, Tensor]:
    return find_gradients(Path(model.path))


def check_gradients(
    got: dict[str, Tensor], wanted: dict[str, Tensor], where: object, most: float = 2e-6
) -> None:
    """`most`: of the largest; processors without AVX-512 round by 1.001e-6 of it."""
    largest = max(value.abs().max().item() for value in wanted.values())
    for name, value in got.items():
        difference = (value - wanted[name]).abs().max().item()
        assert difference <= most * largest, (where, name, difference, largest)


def test_gradients_are_those_of_float64(
    one_process: tuple[Path, Any], wanted: dict[str, Tensor]
) -> None:
    gradients = one_process[1][0]
    assert gradients.keys() == wanted.keys()
    check_gradients(gradients, wanted, "one process")


def test_exported_weights_are_merged(model: ModelConfig, one_process: tuple[Path, Any]) -> None:
    root, (gradients, *_) = one_process
    base = read(Path(model.path))
    factors = {name: draw(name, tuple(g.shape)) for name, g in gradients.items()}
    exported = read(root / "one" / "start")
    for name, value in adapt(base, factors).items():
        torch.testing.assert_close(exported[name], value, rtol=0, atol=1e-6)
        merged = base[name].clone()
        if f"{name}.A" in factors:
            add_product(merged, factors[f"{name}.A"], factors[f"{name}.B"], SCALE)
        assert torch.equal(exported[name], merged), name


def test_the_reference_is_the_model_without_factors(
    model: ModelConfig, one_process: tuple[Path, Any]
) -> None:
    from tests.support.tiny_training import transformers_logprobs

    reference = one_process[1][2]
    for got, want in zip(reference, transformers_logprobs(Path(model.path)), strict=True):
        torch.testing.assert_close(got.logprobs_T, want, rtol=0, atol=1e-4)


@pytest.mark.gloo
@pytest.mark.parametrize(("layouts", "resumed"), CASES)
def test_layouts_agree_and_resume_in_each_other(
    model: ModelConfig,
    one_process: tuple[Path, Any],
    wanted: dict[str, Tensor],
    layouts: list[dict[str, Any]],
    resumed: tuple[int, dict[str, Any], str],
) -> None:
    root, (_, stats, _) = one_process
    first, last = (read(root / "one" / name) for name in ("start", "last"))
    per_layout = run_each(take_steps, 2, layouts, model, root)
    for layout, results in zip(layouts, per_layout, strict=True):
        held = set()
        for gradients, *_ in results:
            check_gradients(gradients, wanted, layout)
            held |= gradients.keys()
        assert held == wanted.keys(), layout
        own = next(own for _, own, _ in results if own[0] is not None)
        for got, want in zip(own, stats, strict=True):
            assert got.loss == pytest.approx(want.loss, abs=1e-6), layout
            assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-5), layout
        merged = read(root / name_of(layout) / "start")
        assert all(torch.equal(merged[name], value) for name, value in first.items()), layout
        check_weights(read(root / name_of(layout) / "last"), last, layout)
    num_ranks, layout, saved = resumed
    run_ranks(resume, num_ranks, model, root, layout, saved)
    check_weights(read(root / f"{saved}_in_{name_of(layout)}"), last, resumed)


def check_weights(got: dict[str, Tensor], wanted: dict[str, Tensor], where: object) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        difference = (got[name] - value).abs().max().item()
        assert difference <= 1e-5, (where, name, difference)


def test_a_checkpoint_holds_the_factors_and_no_weight(one_process: tuple[Path, Any]) -> None:
    from mcore_rl.train.checkpoint_check import read_places_of

    root, (gradients, *_) = one_process
    keys = {key for key, _ in read_places_of(root / "one" / "checkpoint")}
    model_keys = {key for key in keys if not key.startswith(("optimizer", "rng"))}
    assert {f"lora.{name}" for name in gradients} <= model_keys
    assert not any("word_embeddings" in key or "linear_" in key for key in model_keys)


def load_wrongly(rank: int, world_size: int, port: int, models: list[Any], root: Path) -> list[str]:
    """Return what is said about checkpoints of other runs."""
    model, other = models
    none, lora = LoraConfig(), LORA
    said = []
    for path, held, loaded in ((model, lora, none), (model, none, lora), (other, lora, lora)):
        run = (rank, world_size, port)
        before = make_actor(*run, model, ParallelConfig(), OPTIMIZER, lora=held, **NO_BALANCE)
        folder = root / f"checkpoint_{len(said)}"
        before.save(folder, {})
        before.finish_save()
        actor = make_actor(*run, path, ParallelConfig(), OPTIMIZER, lora=loaded, **NO_BALANCE)
        with pytest.raises(ValueError) as error:
            actor.load(folder)
        said.append(str(error.value))
    return said


def test_checkpoints_of_other_runs_are_refused(model: ModelConfig, tmp_path: Path) -> None:
    path = str(write_hf_model(tmp_path / "model", initializer_range=0.07))
    said = run_ranks(load_wrongly, 1, [model, ModelConfig(path=path)], tmp_path)[0]
    assert "holds factors of rank 4 and no weights, and train.lora.rank=0" in said[0]
    assert "holds all weights of a model, and train.lora.rank=4" in said[1]
    assert f"that began with {model.path} has factors of another base" in said[2]
    assert f"those of {path} have" in said[2]


def go_back(rank: int, world_size: int, port: int, model: ModelConfig, root: Path) -> int:
    """Take a second step twice: at once, and after going back from the third.

    Returns the bytes of a kept state.
    """
    actor = start(rank, world_size, port, model, {})
    memory = KeptMemory()
    actor.use_kept_memory([memory.reserve(f"{k}", actor.kept_state_bytes) for k in range(2)])
    step(actor)
    actor.keep_state(1)
    step(actor)
    actor.export_hf(root / "once")
    step(actor)
    actor.restore_state(1)
    actor.export_hf(root / "back")
    step(actor)
    actor.export_hf(root / "twice")
    memory.close()
    return actor.kept_state_bytes


def test_a_state_in_memory_comes_back_with_merged_weights(
    model: ModelConfig, tmp_path: Path
) -> None:
    [num_bytes] = run_ranks(go_back, 1, model, tmp_path)
    config = Config(model=model, train=TrainConfig(lora=LORA))
    [kept] = predict_kept_states(PlannedRun.make(config), config.run.recovery)
    assert num_bytes - HEADER_BYTES - SMALL_BYTES == pytest.approx(kept.rank_bytes, rel=0.02)
    once, back, twice = (read(tmp_path / name) for name in ("once", "back", "twice"))
    for name, value in once.items():
        assert torch.equal(twice[name], value), name
    changed = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(back[changed], once[changed])
