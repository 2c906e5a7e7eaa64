"""A user's file registers advantages and losses, here and in processes that unpickle the loss."""

import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.algo import lookup
from mcore_rl.algo.estimator import Advantages
from mcore_rl.algo.lookup import needs_of
from mcore_rl.algo.policy_loss import make_policy_loss
from mcore_rl.algo.registry import advantages, losses
from mcore_rl.checks.algorithm import check_algorithm
from mcore_rl.config import AlgorithmConfig, Config
from mcore_rl.types import Prompt, Sample, TrainBatch, VersionSpan, WeightVersion
from mcore_rl.types.scores import Scores
from tests.support.documented import own_algorithm
from tests.support.laid_out import estimate, make_train_batch

EXAMPLE = own_algorithm()
IMPORT = "from mcore_rl.algo.registry import Needs, advantages, losses\n"


@pytest.fixture(autouse=True)
def built_in_only() -> Iterator[None]:
    before = [(registry, registry.names) for registry in (advantages, losses)]
    yield
    for registry, names in before:
        registry.keep_only(names)
    forget()


def forget() -> None:
    """Make this process like one that has loaded no user's file."""
    lookup._files.clear()
    lookup.register_user_file.cache_clear()


def config_of(tmp_path: Path, source: str, **options: Any) -> AlgorithmConfig:
    path = tmp_path / "my_algo.py"
    path.write_text(source)
    return AlgorithmConfig(path=str(path), **options)


def make_samples() -> list[Sample]:
    prompt = Prompt(0, (1, 2), (), "unit", "")
    spans = (VersionSpan(0, 2, WeightVersion(0)),)
    return [Sample(prompt, i, (3, 4), (-0.5, -0.5), "stop", spans, "") for i in range(2)]


def test_the_documented_example_trains_a_batch(tmp_path: Path) -> None:
    options = {"advantage": "greedy_margin", "loss": "tanh_gate", "clip_high": 0.2}
    config = config_of(tmp_path, EXAMPLE, **options)
    check_algorithm(Config(algorithm=config))
    assert needs_of(config).greedy_baseline

    samples = make_samples()
    scores = Scores([1.0, 0.0], greedy_N=[0.25, 0.25])
    batch, _ = estimate(Advantages(config), scores, samples, make_train_batch(samples))
    assert batch.advantages_T is not None
    assert batch.advantages_T.tolist() == [0, 0, 0.75, 0.75, 0, 0, -0.25, -0.25]

    logprobs_T = torch.full((8,), -0.5, requires_grad=True)
    batch = replace(batch, old_logprobs_T=torch.full((8,), -0.6))
    loss_T, metrics = make_policy_loss(config)(logprobs_T, torch.zeros(8), batch)
    gate = 1 + 0.2 * torch.tanh((torch.tensor(0.1).exp() - 1) / 0.2)
    expected_T = -torch.tensor([0, 0, 0.75, 0.75, 0, 0, -0.25, -0.25]) * gate
    torch.testing.assert_close(loss_T, expected_T, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(metrics["clip/gate"][2:4], gate.expand(2))


def test_the_loss_works_in_a_process_that_cannot_see_the_file(tmp_path: Path) -> None:
    config = config_of(tmp_path, EXAMPLE, loss="tanh_gate")
    pickled = pickle.dumps(make_policy_loss(config))
    batch = make_train_batch(make_samples())
    batch = replace(batch, advantages_T=batch.loss_mask_T.float())
    before = losses.names
    losses.keep_only([name for name in before if name != "tanh_gate"])
    advantages.keep_only([name for name in advantages.names if name != "greedy_margin"])
    forget()
    Path(config.path).unlink()
    loss_T, _ = pickle.loads(pickled)(torch.full((8,), -0.5), torch.zeros(8), batch)
    assert loss_T.tolist() == [0, 0, -1, -1, 0, 0, -1, -1]
    assert losses.names == before


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\ny = 1 / 0\n", r"my_algo.py line 2: ZeroDivisionError: division by zero$"),
        ("def broken(:\n", r"my_algo.py line 1: SyntaxError: "),
        (
            "import sys\nsys.exit(3)\n",
            r"my_algo.py line 2: SystemExit: the code tried to end the process with st",
        ),
        ("x = 1\n", r"my_algo.py: registers no advantage and no loss; decorate"),
        (
            IMPORT + "@advantages.register('grpo')\ndef grpo(outcomes, config): ...\n",
            r"my_algo.py line \d: ValueError: algorithm.advantage='grpo' is registered already, by"
            r" mcore_rl.algo.advantages: choose another name$",
        ),
    ],
)
def test_a_bad_file_is_refused_in_one_line_and_leaves_nothing_behind(
    tmp_path: Path, source: str, message: str
) -> None:
    config = config_of(tmp_path, source)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^algorithm.path=.*{message}") as refused:
            check_algorithm(Config(algorithm=config))
        assert "\n" not in str(refused.value)


def test_a_file_that_fails_late_leaves_no_names_behind(tmp_path: Path) -> None:
    early = "@losses.register('early')\ndef make(config): ...\n"
    with pytest.raises(ValueError, match="NameError"):
        needs_of(config_of(tmp_path, IMPORT + early + "unknown\n"))
    assert "early" not in losses.names


def test_a_missing_file_and_an_unknown_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^algorithm.path=/nowhere.py: no such file in "):
        needs_of(AlgorithmConfig(path="/nowhere.py"))
    with pytest.raises(ValueError, match=r"algorithm.loss='tanh' .*did you mean 'tanh_gate'"):
        needs_of(config_of(tmp_path, EXAMPLE, loss="tanh"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return tokens.advantages_T, {}", r"algorithm.loss=direct: AttributeError: .* a loss is"),
        (
            "return 3",
            r"algorithm.loss=direct: made 3 from the options of algorithm, not a function",
        ),
    ],
)
def test_a_function_that_is_no_maker_of_a_loss_is_refused(
    tmp_path: Path, body: str, message: str
) -> None:
    source = f"{IMPORT}@losses.register('direct')\ndef direct(tokens):\n    {body}\n"
    with pytest.raises(ValueError, match=message):
        make_policy_loss(config_of(tmp_path, source, loss="direct"))


SURPRISAL = (
    "    def surprisal(tokens):\n"
    "        mean_T = tokens.sequence_mean(tokens.logprobs_T)\n"
    "        above_T = tokens.logprobs_T - mean_T\n"
    "        scale_T = tokens.sequence_mean(above_T.square()).sqrt()\n"
    "        return -tokens.advantages_T * scale_T * tokens.logprobs_T, {}\n"
    "    return surprisal\n"
)


def surprisal_file(needs: str) -> str:
    """Return a file with a loss that scales by the spread of a whole sample's log-probs."""
    return f"{IMPORT}@losses.register('surprisal'{needs})\ndef make(config):\n{SURPRISAL}"


def test_a_loss_that_did_not_ask_for_whole_samples_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, surprisal_file(""), loss="surprisal")
    wanted = r"algorithm.loss=surprisal, tried on two tokens: .*losses.register\('surprisal', Needs"
    with pytest.raises(ValueError, match=wanted):
        make_policy_loss(config)


def test_a_loss_that_raises_is_refused_before_anything_starts(tmp_path: Path) -> None:
    source = (
        f"{IMPORT}@losses.register('typo')\ndef make(config):\n"
        "    return lambda tokens: (tokens.log_ratios_T, {})\n"
    )
    with pytest.raises(ValueError, match=r"loss=typo, tried on two tokens: AttributeError: "):
        make_policy_loss(config_of(tmp_path, source, loss="typo"))


def test_a_loss_that_asks_for_ranks_or_stops_is_left_to_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        f"{IMPORT}import torch.distributed as dist\n@losses.register('ranks')\ndef make(config):\n"
        "    def loss(tokens):\n        breakpoint()\n        dist.all_reduce(tokens.logprobs_T)\n"
        "    return loss\n"
    )
    stops = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(1))
    make_policy_loss(config_of(tmp_path, source, loss="ranks"))
    assert not stops
    breakpoint()
    assert stops


@pytest.mark.parametrize("lens", [(4, 4), (8,)])
def test_means_of_a_users_loss_are_those_of_the_whole_sample(
    tmp_path: Path, lens: tuple[int, ...]
) -> None:
    source = surprisal_file(", Needs(whole_samples=True)")
    config = config_of(tmp_path, source, loss="surprisal")
    assert needs_of(config).whole_samples
    logprobs_T = torch.linspace(-2, -0.25, 8, dtype=torch.float64)
    ones_T = torch.ones(8, dtype=torch.float64)
    batch = TrainBatch(torch.arange(8), ones_T > 0, lens, advantages_T=ones_T)
    batch = replace(batch, sample_N=(0,) * len(lens))
    loss_T, _ = make_policy_loss(config)(logprobs_T, ones_T, batch)
    torch.testing.assert_close(loss_T, -logprobs_T.std(correction=0) * logprobs_T)


def test_advantages_of_the_wrong_shape_are_refused(tmp_path: Path) -> None:
    body = "return outcomes.scores_N"
    source = f"{IMPORT}@advantages.register('flat')\ndef flat(outcomes, config):\n    {body}\n"
    samples = make_samples()
    estimator = Advantages(config_of(tmp_path, source, advantage="flat"))
    with pytest.raises(ValueError, match=r"algorithm.advantage=flat returned shape \(2,\) for 4"):
        estimate(estimator, Scores([1.0, 0.0]), samples, make_train_batch(samples))


def test_dataclasses_work_in_a_file(tmp_path: Path) -> None:
    source = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        f"{IMPORT}@dataclass\nclass Scale:\n    by: float = 2.0\n"
        "@advantages.register('scaled')\ndef scaled(outcomes, config):\n"
        "    return outcomes.spread(outcomes.scores_N * Scale().by)\n"
    )
    samples = make_samples()
    estimator = Advantages(config_of(tmp_path, source, advantage="scaled"))
    batch, _ = estimate(estimator, Scores([1.0, 0.5]), samples, make_train_batch(samples))
    assert batch.advantages_T is not None and batch.advantages_T.sum() == 6
