"""Layers for multi-token prediction learn by the formula, and the policy learns as without them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_tools.cli import main
from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from mcore_rl.planning.memory import count_parameters
from mcore_rl.train.actor import Actor
from mcore_rl.weights.layouts.layout import check_rank
from mcore_rl.weights.layouts.megatron import MegatronLayout, MegatronSizes
from mcore_rl.weights.models import family_of
from tests.support.distributed import run_ranks
from tests.support.gradients import (
    boxed_gradients,
    check_gradients,
    find_tolerance,
    whole_gradients,
)
from tests.support.tiny_mtp import (
    Drafted,
    draft_in_double,
    list_mtp_names,
    load_weights,
    write_mtp_model,
)
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    make_batches,
    my_batches,
    token_loss,
)

KINDS = (
    *("deepseek_v3", "glm4_moe", "glm4_moe_lite", "hunyuan_v3"),
    *("qwen3_next", "qwen3_5", "qwen3_5_moe"),
)
COEF = 0.3
CLIP = 0.05
"""Far below the norm of any gradient here."""
TOLERANCE = 5e-6
"""Share of the largest gradient. Rounding to float32 alone is 3.1e-6 of it."""
Case = tuple[str, dict[str, Any], str, float]
"""(model, layout, recompute, mtp_loss)"""
ALONE: list[Case] = [
    ("deepseek_v3", {}, "none", 0.0),
    ("deepseek_v3", {}, "none", COEF),
    ("glm4_moe", {}, "none", COEF),
    ("qwen3_next", {}, "none", 0.0),
    ("qwen3_next", {}, "none", COEF),
    ("qwen3_5", {}, "none", COEF),
    ("qwen3_5_moe", {}, "none", COEF),
    ("glm4_moe_lite", {}, "none", COEF),
    ("hunyuan_v3", {}, "none", COEF),
]
QUICK: list[Case] = [
    ("deepseek_v3", {"pp": 2}, "none", COEF),
    ("qwen3_next", {"tp": 2, "ep": 2}, "none", COEF),
    ("qwen3_5", {"pp": 2}, "full", COEF),
]
SAVED = (QUICK[0], QUICK[2])
"""The state after their step is saved."""
RECOMPUTED: list[Case] = [
    ("deepseek_v3", {"tp": 2, "ep": 2}, "full", COEF),
    ("deepseek_v3", {"tp": 2, "ep": 2}, "full", 0.0),
]
FURTHER: list[Case] = [
    ("deepseek_v3", {"tp": 2, "pp": 2, "ep": 2}, "none", COEF),
    ("deepseek_v3", {"pp": 2, "vpp": 2, "ep": 2}, "full", COEF),
    ("deepseek_v3", {"tp": 2, "cp": 2, "ep": 4}, "moe", COEF),
    ("glm4_moe", {"tp": 2, "pp": 2, "etp": 2}, "none", COEF),
    ("glm4_moe", {"cp": 2, "dp": 2}, "full", COEF),
    ("glm4_moe_lite", {"tp": 2, "pp": 2, "ep": 2}, "none", COEF),
    ("hunyuan_v3", {"tp": 2, "cp": 2, "ep": 4}, "full", COEF),
    ("qwen3_next", {"tp": 2, "pp": 2, "ep": 2}, "none", COEF),
    ("qwen3_next", {"tp": 2, "cp": 2, "ep": 4}, "none", COEF),
    ("qwen3_5", {"tp": 2, "pp": 2, "vpp": 2}, "none", COEF),
    ("qwen3_5_moe", {"tp": 4, "ep": 2, "etp": 2}, "full", COEF),
]


def run_cases(
    rank: int, world_size: int, port: int, folder: Path, cases: list[Case]
) -> list[dict[str, Any]]:
    """Run the cases one after the other, since to import the trainer takes longest."""
    return [run_case(rank, world_size, port, folder, case) for case in cases]


def run_case(rank: int, world_size: int, port: int, folder: Path, case: Case) -> dict[str, Any]:
    """Return the stats of a step, its gradients, and this rank's weights after it.

    Exports the weights before the step.
    """
    kind, layout, recompute, coef = case
    actor = make_actor(
        rank,
        world_size,
        port,
        ModelConfig(path=str(folder / kind)),
        ParallelConfig(**layout),
        OptimizerConfig(lr=1e-3, clip_grad=CLIP),
        recompute=recompute,
        mtp_loss=coef,
    )
    actor.export_hf(name_export(folder, case))
    check_layout(actor, rank, ParallelConfig(**layout))
    shards, tensors = actor.weight_layout()
    step = actor.train_step(my_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
    if case in SAVED:
        actor.save(folder / f"checkpoint-{kind}", {})
        actor.finish_save()
        actor.export_hf(folder / f"after-{kind}")
    return {
        "step": step,
        "gradients": boxed_gradients(actor),
        "weights": {f"{s.box}": s.view(tensors).clone() for s in shards},
        "served": {shard.box.name for shard in actor.select_served_layout()[0]},
    }


def check_layout(actor: Actor, rank: int, parallel: ParallelConfig) -> None:
    """Compare what the rank holds with what plans say of it."""
    config = actor.hf_config
    sizes = MegatronSizes.from_config(parallel, config)
    layout = MegatronLayout(family_of(config), config, sizes, "float32")
    check_rank(layout, rank, actor.weight_layout()[0])
    count = count_parameters(layout, sizes, rank // sizes.stage_ranks)
    parameters = [p for chunk in actor.chunks for p in chunk.named_parameters()]
    assert count.total == sum(p.numel() for _, p in parameters)
    assert count.expert == sum(p.numel() for name, p in parameters if ".experts." in name)


def name_export(folder: Path, case: Case) -> Path:
    kind, layout, _, coef = case
    sizes = "-".join(f"{name}{size}" for name, size in layout.items())
    return folder / f"export-{kind}-{sizes}-{coef}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp")
    for kind in KINDS:
        write_mtp_model(kind, folder / kind)
    return folder


@pytest.fixture(scope="module")
def exact(folder: Path) -> Mapping[str, Drafted]:
    return {kind: draft_in_double(folder / kind, make_batches()) for kind in KINDS}


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(run_cases, 1, folder, ALONE, timeout_s=600)[0]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, QUICK), id="two_ranks"),
        pytest.param((2, RECOMPUTED), id="recomputed", marks=pytest.mark.slow),
        pytest.param((4, FURTHER), id="four_ranks", marks=pytest.mark.slow),
    ],
)
def cut(folder: Path, request: pytest.FixtureRequest) -> list[tuple[Case, list[dict[str, Any]]]]:
    num_ranks, cases = request.param
    by_rank = run_ranks(run_cases, num_ranks, folder, cases, timeout_s=600)
    return list(zip(cases, map(list, zip(*by_rank, strict=True)), strict=True))


def check_drafts(exact: Any, folder: Path, case: Case, ranks: list[dict[str, Any]]) -> None:
    """Compare loss, acceptance and, before clipping, gradients with those in float64."""
    kind, *_, coef = case
    drafted: Drafted = exact[kind]
    names = list_mtp_names(folder / kind)
    norm = coef * sum(float(g.square().sum()) for g in drafted.gradients.values()) ** 0.5
    for step in (rank["step"] for rank in ranks if rank["step"] is not None):
        assert step.metrics["mtp/loss"] == pytest.approx(drafted.loss, rel=1e-6), case
        assert step.metrics["mtp/acceptance"] == pytest.approx(drafted.acceptance, abs=1e-9), case
        assert step.metrics["mtp/grad_norm"] == pytest.approx(norm, rel=1e-5), case
    scale = coef * min(1.0, CLIP / norm)
    clipped = {name: (scale * g).float() for name, g in drafted.gradients.items()}
    assert names - clipped.keys() == {name for name in names if name.endswith("_bias")}
    boxed = [[(box, g) for box, g in rank["gradients"] if box.name in names] for rank in ranks]
    check_gradients(boxed, clipped, case, find_tolerance(kind, TOLERANCE))


@pytest.mark.gloo
def test_layers_learn_by_the_formula(exact: Any, folder: Path, alone: Any) -> None:
    for case, result in zip(ALONE, alone, strict=True):
        if case[-1]:
            check_drafts(exact, folder, case, [result])


@pytest.mark.gloo
def test_layouts_teach_layers_alike(exact: Any, folder: Path, alone: Any, cut: Any) -> None:
    whole = {case[0]: result for case, result in zip(ALONE, alone, strict=True) if case[-1]}
    for case, ranks in cut:
        if case[-1]:
            check_drafts(exact, folder, case, ranks)
        names = list_mtp_names(folder / case[0])
        one_process = whole[case[0]]
        for step in (rank["step"] for rank in ranks if rank["step"] is not None):
            assert step.loss == pytest.approx(one_process["step"].loss, abs=1e-6), case
        wanted = whole_gradients(one_process["gradients"])
        wanted = {name: g for name, g in wanted.items() if name not in names}
        boxed = [
            [(box, g) for box, g in rank["gradients"] if box.name not in names] for rank in ranks
        ]
        check_gradients(boxed, wanted, case, find_tolerance(case[0], TOLERANCE))


def check_policy(without: dict[str, Any], trained: dict[str, Any]) -> None:
    """Compare gradients and weights of all but these layers, bit for bit."""
    gradients = {f"{box}": gradient for box, gradient in trained["gradients"]}
    for box, gradient in without["gradients"]:
        assert torch.equal(gradients[f"{box}"], gradient), box
    for name, weight in without["weights"].items():
        assert torch.equal(trained["weights"][name], weight), name
    assert len(trained["weights"]) > len(without["weights"])
    if without["step"] is not None:
        assert trained["step"].grad_norm == without["step"].grad_norm > 2 * CLIP
        assert trained["step"].loss == without["step"].loss
        assert "mtp/loss" not in without["step"].metrics


@pytest.mark.gloo
def test_the_policy_learns_bit_for_bit_as_without_them(alone: Any, cut: Any) -> None:
    check_policy(alone[0], alone[1])
    check_policy(alone[3], alone[4])
    if cut[0][0] == RECOMPUTED[0]:
        (_, trained), (_, without) = cut
        for pair in zip(without, trained, strict=True):
            check_policy(*pair)


@pytest.mark.gloo
def test_weights_come_back_byte_for_byte(folder: Path, alone: Any, cut: Any) -> None:
    for case in (*ALONE, *(case for case, _ in cut)):
        source, exported = load_weights(folder / case[0]), load_weights(name_export(folder, case))
        assert exported.keys() == source.keys(), case
        for name, tensor in source.items():
            assert torch.equal(exported[name], tensor), (case, name)


def resume(rank: int, world_size: int, port: int, folder: Path) -> list[str]:
    """Export what checkpoints have; return why runs without MTP layers refuse them."""
    messages = []
    for kind, *_ in SAVED:
        model = ModelConfig(path=str(folder / kind))
        actor = make_actor(rank, world_size, port, model, ParallelConfig(), mtp_loss=COEF)
        actor.load(folder / f"checkpoint-{kind}")
        actor.export_hf(folder / f"resumed-{kind}")
        plain = make_actor(rank, world_size, port, model, ParallelConfig())
        with pytest.raises(ValueError) as error:
            plain.load(folder / f"checkpoint-{kind}")
        messages.append(str(error.value))
    return messages


@pytest.mark.gloo
def test_checkpoints_resume_in_another_layout_and_are_merged(folder: Path, cut: Any) -> None:
    if SAVED[0] not in [case for case, _ in cut]:
        return
    [messages] = run_ranks(resume, 1, folder)
    for (kind, *_), message in zip(SAVED, messages, strict=True):
        assert "has trained layers for multi-token prediction: set train.mtp_loss above" in message
        source, checkpoint = str(folder / kind), str(folder / f"checkpoint-{kind}")
        merged = folder / f"merged-{kind}"
        assert main(["to-hf", checkpoint, str(merged), "--source-hf", source]) == 0
        assert main(["verify", checkpoint, str(merged)]) == 0
        after, before = load_weights(folder / f"after-{kind}"), load_weights(folder / kind)
        changed = {name for name in after if not torch.equal(after[name], before[name])}
        assert changed >= {n for n in list_mtp_names(folder / kind) if "bias" not in n}
        for made in (folder / f"resumed-{kind}", merged):
            weights = load_weights(made)
            assert weights.keys() == after.keys()
            for name, tensor in after.items():
                assert torch.equal(weights[name], tensor), (made, name)
        assert "trained_mtp" not in (merged / "config.json").read_text()


@pytest.mark.gloo
def test_engines_get_all_but_these_layers(folder: Path, alone: Any) -> None:
    for plain, trained, kind in ((*alone[:2], "deepseek_v3"), (*alone[3:5], "qwen3_next")):
        assert trained["served"] == plain["served"]
        assert not trained["served"] & list_mtp_names(folder / kind)
