"""Several adapters that ranks train in turns: each is bit for bit what it is alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from checkpoint_tools.cli import main
from mcore_rl.config import LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig
from mcore_rl.config.training import AdapterConfig
from mcore_rl.process.kept_memory import KeptMemory
from mcore_rl.train.actor import Actor
from mcore_rl.train.optimizer import list_own_states, parts_of
from mcore_rl.types import LogprobOptions
from mcore_rl.weights.lora.peft_files import read_peft
from tests.scenarios.train.test_lora import named_factors
from tests.support.distributed import run_ranks
from tests.support.optimizer_layouts import read
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    make_batches,
    my_batches,
    token_loss,
    write_hf_model,
)

OPTIMIZER = OptimizerConfig(lr=1e-2, schedule="linear", warmup_steps=2)
NUM_STEPS = 2
"""Each adapter takes so many."""


def make_lora(count: int) -> LoraConfig:
    """Options of adapters of ranks 1, 2, ..., whose alphas differ, too."""
    ranks = range(1, count + 1)
    adapters = [AdapterConfig(name=f"a{rank}", rank=rank, alpha=3.0 + rank) for rank in ranks]
    return LoraConfig(rank=1, adapters=adapters)


def start(run: tuple[int, int, int], model: ModelConfig, layout: Any, lora: LoraConfig) -> Actor:
    parallel = ParallelConfig(**layout)
    options: dict[str, Any] = {"lora": lora, "router_aux_loss_coef": 0.0}
    return make_actor(*run, model, parallel, OPTIMIZER, **options)


def take_step(actor: Actor, number: int) -> tuple[Any, Any]:
    """Return the scores before, and the stats of, a step on batches of the adapter `number`."""
    made = make_batches()
    made = my_batches(made[number % 4 :] + made[: number % 4])
    batches = []
    for batch in made:
        assert batch.advantages_T is not None
        batches.append(replace(batch, advantages_T=(number + 1.0) * batch.advantages_T))
    scores = actor.compute_logprobs(batches)
    stats = actor.train_step(batches, token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
    if stats is not None:
        stats = stats.loss, stats.grad_norm, stats.learning_rate
    return scores and [score.logprobs_T for score in scores], stats


def read_state(actor: Actor) -> dict[str, Tensor]:
    """Return copies of factors, and of what the optimizer holds of each."""
    state = {name: factor.detach().clone() for name, factor in named_factors(actor).items()}
    names = {
        id(parameter): name
        for chunk in actor.chunks
        for name, parameter in unwrap_model(chunk).named_parameters()
    }
    for part in parts_of(actor.optimizer):
        for parameter, start, states in list_own_states(part):
            for kind, value in states.items():
                key = f"{names[id(parameter)]} {start} {kind}"
                state[key] = value.detach().clone()
    return state


Outcome = dict[str, tuple[list[Any], dict[str, Tensor]]]
"""By adapter: scores and stats of its steps, and its state after them."""


def train_alone(
    rank: int, world_size: int, port: int, model: ModelConfig, layout: Any, count: int
) -> Outcome:
    outcome: Outcome = {}
    for number, (name, own) in enumerate(make_lora(count).list_adapters().items()):
        actor = start((rank, world_size, port), model, layout, own)
        steps = [take_step(actor, number) for _ in range(NUM_STEPS)]
        outcome[name] = steps, read_state(actor)
    return outcome


def train_in_turns(
    rank: int, world_size: int, port: int, model: ModelConfig, layout: Any, count: int, root: Path
) -> Outcome:
    """Train with a checkpoint after the first turn of each, and a state kept in memory as well.

    The second turns are taken twice: after a return to the kept state, and in another actor that
    loaded the checkpoint.
    """
    run, lora = (rank, world_size, port), make_lora(count)
    actor = start(run, model, layout, lora)
    memory = KeptMemory()
    actor.use_kept_memory([memory.reserve(f"{k}", actor.kept_state_bytes) for k in range(2)])
    steps: dict[str, list[Any]] = {name: [] for name in lora.list_adapters()}

    def take_turns(actor: Actor) -> dict[str, Any]:
        taken = {}
        for number, name in enumerate(steps):
            actor.choose_adapter(name)
            taken[name] = take_step(actor, number)
        return taken

    first = take_turns(actor)
    actor.keep_state(1)
    actor.save(root / "checkpoint", {})
    actor.finish_save()
    actor.export_hf(root / "hf")
    take_turns(actor)
    actor.restore_state(1)
    assert actor.step == count
    again = take_turns(actor)
    resumed = start(run, model, layout, lora)
    resumed.load(root / "checkpoint")
    last = take_turns(resumed)
    outcome: Outcome = {}
    for name in steps:
        for each in (actor, resumed):
            each.choose_adapter(name)
        outcome[name] = [first[name], again[name]], read_state(actor)
        check_equal((again[name], read_state(actor)), (last[name], read_state(resumed)), name)
    memory.close()
    return outcome


def check_equal(got: Any, wanted: Any, where: str) -> None:
    """Compare nested tensors and numbers bit by bit."""
    if isinstance(wanted, Tensor):
        assert torch.equal(got, wanted), where
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), where
        for key, value in wanted.items():
            check_equal(got[key], value, f"{where} {key}")
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted), where
        for i, value in enumerate(wanted):
            check_equal(got[i], value, f"{where} {i}")
    else:
        assert got == wanted, (where, got, wanted)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(path=str(write_hf_model(tmp_path_factory.mktemp("turns") / "model")))


@pytest.mark.parametrize(
    ("num_ranks", "layout", "count"),
    [
        pytest.param(1, {}, 3, id="one"),
        pytest.param(2, {"tp": 2, "ep": 2}, 3, id="tensor_parallel", marks=pytest.mark.slow),
        pytest.param(2, {"pp": 2, "vpp": 2}, 2, id="pipeline", marks=pytest.mark.slow),
        pytest.param(2, {"dp": 2, "ep": 1}, 8, id="eight", marks=pytest.mark.slow),
    ],
)
@pytest.mark.gloo
def test_each_adapter_is_what_it_is_alone(
    model: ModelConfig, num_ranks: int, layout: Any, count: int, tmp_path: Path
) -> None:
    alone = run_ranks(train_alone, num_ranks, model, layout, count)
    turns = run_ranks(train_in_turns, num_ranks, model, layout, count, tmp_path)
    for rank, (got, wanted) in enumerate(zip(turns, alone, strict=True)):
        check_equal(got, wanted, f"rank {rank}")
    stats = [steps[-1][1] for own in alone for steps, _ in own.values()]
    assert len({loss for loss, *_ in filter(None, stats)}) == count
    check_files(model, tmp_path, [dict(got) for got in turns])


def check_files(model: ModelConfig, root: Path, turns: list[Outcome]) -> None:
    """Check that the checkpoint gives each adapter by its name, in PEFT's format and merged."""
    saved, base = str(root / "checkpoint"), ["--source-hf", model.path]
    for name in turns[0]:
        out = root / name
        assert main(["to-hf", saved, str(out), "--lora", "--name", name, *base]) == 0
        adapter = read_peft(out)
        assert adapter.rank == int(name[1:]) and adapter.alpha == 3.0 + adapter.rank
        merged = root / f"merged_{name}"
        assert main(["merge-lora", saved, str(merged), "--name", name, *base]) == 0
        exported = read(root / "hf" / name)
        for key, value in read(merged).items():
            torch.testing.assert_close(exported[key], value, rtol=0, atol=1e-6)
    assert main(["to-hf", saved, str(root / "none"), "--lora", *base]) == 2
    assert main(["merge-lora", saved, str(root / "none"), "--name", "a9", *base]) == 2


def refuse(rank: int, world_size: int, port: int, model: ModelConfig, root: Path) -> list[str]:
    """Return what is said of an unknown adapter, and of a checkpoint of other adapters."""
    run, said = (rank, world_size, port), []
    actor = start(run, model, {}, make_lora(2))
    actor.save(root / "two", {})
    actor.finish_save()
    other = make_lora(2)
    other.adapters[1].rank = 4
    for wrong in (make_lora(1), other, make_lora(1).list_adapters()["a1"]):
        with pytest.raises(ValueError) as error:
            start(run, model, {}, wrong).load(root / "two")
        said.append(str(error.value))
    with pytest.raises(ValueError) as error:
        actor.choose_adapter("a9")
    return [*said, str(error.value)]


def test_other_adapters_are_refused(model: ModelConfig, tmp_path: Path) -> None:
    said = run_ranks(refuse, 1, model, tmp_path)[0]
    assert "holds adapters a1, a2, and this run trains adapters a1" in said[0]
    assert "adapter a2 holds factors of train.lora.rank=2, and this run has" in said[1]
    assert "holds adapters a1, a2, and this run trains one adapter" in said[2]
    assert "there is no adapter 'a9' to train: there are a1, a2" in said[3]


def start_from_file(
    rank: int, world_size: int, port: int, model: ModelConfig, root: Path
) -> list[dict[str, Tensor]]:
    """Return the factors of a2 that another run trained, and of a run that starts from them."""
    run, states = (rank, world_size, port), []
    lora = make_lora(2)
    for path in ("", str(root / "a2")):
        lora.adapters[1].path = path
        actor = start(run, model, {}, lora)
        actor.choose_adapter("a2")
        if not path:
            take_step(actor, 1)
            actor.save(root / "two", {})
            actor.finish_save()
            command = ["to-hf", str(root / "two"), str(root / "a2"), "--lora", "--name", "a2"]
            assert main([*command, "--source-hf", model.path]) == 0
        states.append({name: factor.detach() for name, factor in named_factors(actor).items()})
    return states


def test_an_adapter_starts_from_a_file_of_its_own(model: ModelConfig, tmp_path: Path) -> None:
    [(trained, begun)] = run_ranks(start_from_file, 1, model, tmp_path)
    check_equal(begun, trained, "a2")
    assert any(factor.any() for name, factor in begun.items() if name.endswith(".B"))


def compare_references(
    rank: int, world_size: int, port: int, model: ModelConfig
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the reference's log-probs after steps of two adapters, and of the base alone."""
    run = (rank, world_size, port)
    actor = start(run, model, {}, make_lora(2))
    for number, name in enumerate(("a1", "a2")):
        actor.choose_adapter(name)
        take_step(actor, number)
    options = LogprobOptions(temperature=1.0, reference=True)
    base = start(run, model, {}, LoraConfig())
    scores = actor.compute_logprobs(my_batches(), options), base.compute_logprobs(my_batches())
    first, second = ([score.logprobs_T for score in own or []] for own in scores)
    return first, second


def test_the_reference_is_the_model_without_adapters(model: ModelConfig) -> None:
    [(got, wanted)] = run_ranks(compare_references, 1, model)
    check_equal(got, wanted, "reference")
