"""Every family computes transformers' log-probs in every layout and exports its weights.

Gradients in every layout are those of one process, element by element.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.train.weights import local_parts
from mcore_rl.types import StepStats
from mcore_rl.weights.hf.config import ModelFacts, read_hf_config
from mcore_rl.weights.hf.files import list_carried_tensors
from mcore_rl.weights.hf.opened import open_hf_dir
from mcore_rl.weights.layouts.training import LocalPart, make_training_shards
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.table import HfTensor, Rule
from tests.support import models_table
from tests.support.ahead import chosen_cases
from tests.support.distributed import run_each
from tests.support.gradients import (
    Boxed,
    boxed_gradients,
    check_gradients,
    find_tolerance,
    whole_gradients,
)
from tests.support.tiny_models import write_model
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    my_batches,
    token_loss,
    transformers_logprobs,
)

Layout = dict[str, Any]
Case = tuple[str, int, Layout]
"""(kind of model, number of the layout, layout)"""
LAYOUTS: Mapping[str, list[Layout]] = {
    "qwen3_moe": [{"tp": 2, "pp": 2, "ep": 2}, {"tp": 4, "ep": 2, "etp": 2}],
    "qwen2_moe": [{"tp": 2, "pp": 2, "ep": 2}, {"tp": 4, "ep": 2, "etp": 2}],
    "mixtral": [{"tp": 2, "cp": 2, "ep": 4}, {"pp": 2, "vpp": 2, "ep": 2}],
    "olmoe": [{"tp": 2, "pp": 2, "ep": 2}, {"tp": 4, "ep": 4}],
    "glm4_moe": [{"tp": 2, "pp": 2, "ep": 2}, {"tp": 2, "cp": 2, "ep": 4}],
    "minimax_m2": [{"tp": 4, "ep": 2, "etp": 2}, {"tp": 2, "cp": 2, "ep": 4}],
    "gpt_oss": [{"tp": 2, "pp": 2, "ep": 2}, {"tp": 2, "cp": 2, "ep": 4}],
    "moonlight": [{"tp": 2, "pp": 2, "ep": 2}, {"tp": 2, "cp": 2, "ep": 4}],
    "kimi_k2": [{"tp": 2, "pp": 2, "ep": 2}, {"tp": 2, "cp": 2, "ep": 4}],
    "glm4_moe_lite": [{"tp": 2, "pp": 2, "ep": 2}, {"tp": 2, "cp": 2, "ep": 4}],
    "hunyuan_v3": [{"tp": 2, "pp": 2, "ep": 2}, {"tp": 2, "cp": 2, "ep": 4}],
    "qwen3": [{"tp": 2, "pp": 2, "vpp": 2}],
    "qwen3_further": [{"tp": 4}],
    "qwen2": [{"tp": 4}, {"pp": 2, "cp": 2}],
    "llama": [{"tp": 2, "pp": 2}, {"tp": 2, "cp": 2}],
    "deepseek_v3": [{"tp": 2, "pp": 2, "ep": 2}],
    "deepseek_v3_further": [
        {"tp": 2, "ep": 2, "etp": 2},
        {"pp": 2, "vpp": 2, "ep": 2},
        {"tp": 2, "cp": 2, "ep": 4},
    ],
    "deepseek_v2": [{"tp": 2, "pp": 2, "ep": 2}, {"cp": 2, "dp": 2}],
    "deepseek_v32": [
        {"tp": 2, "pp": 2, "ep": 2},
        {"tp": 2, "ep": 2, "etp": 2},
        {"pp": 2, "vpp": 2, "ep": 2},
        {"tp": 2, "cp": 2, "ep": 4},
    ],
    "glm5": [{"tp": 2, "pp": 2, "ep": 2}, {"cp": 2, "dp": 2}],
    "qwen3_next": [{"tp": 2, "pp": 2, "ep": 2}, {"tp": 2, "cp": 2, "ep": 4}],
    "nemotron3": [{"tp": 2, "pp": 2, "ep": 2}, {"tp": 2, "cp": 2, "ep": 4}],
    "nemotron3_latent": [{"tp": 4, "ep": 2, "etp": 2}, {"pp": 2, "vpp": 2, "ep": 2}],
    "qwen3_5": [{"tp": 4}, {"tp": 2, "pp": 2, "vpp": 2}],
    "qwen3_5_moe": [{"tp": 4, "ep": 2, "etp": 2}, {"pp": 2, "vpp": 2, "ep": 2}],
}
"""Layouts of four ranks. With two key-value heads and tp = 4, two ranks share each head.

Behind a family's name, `_further` are those of its layouts that are left to the night.
"""

BESIDE = ("model.layers.4.eh_proj.weight", "model.layers.4.shared_head.norm.weight")
"""A multi-token-prediction layer, which checkpoints may hold but Megatron's model leaves out."""
WITH_MTP = ("deepseek_v3", "deepseek_v3_further", "glm4_moe")
TOLERANCE = 2e-6
"""Share of the largest gradient. Rounding to float32 alone is 1.1e-6 of it."""
QUICK = ("deepseek_v3", "qwen3")
CHOSEN = pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k not in QUICK)) for k in LAYOUTS]
)


def name_family(kind: str) -> str:
    return kind.removesuffix("_further")


def run_case(
    rank: int, world_size: int, port: int, folder: Path, case: Case
) -> tuple[Any, int, StepStats | None, Boxed, list[LocalPart]]:
    """Export the weights and take a step.

    Returns the log-probs of this rank's batches, its data-parallel coordinate, the step's stats,
    its gradients and, if it is the only rank, the parts of Megatron's tensors that its parameters
    hold.
    """
    from megatron.core import parallel_state as ps

    kind, i, layout = case
    model = ModelConfig(path=str(folder / kind))
    actor = make_actor(rank, world_size, port, model, ParallelConfig(**layout))
    scores = actor.compute_logprobs(my_batches())
    actor.export_hf(folder / f"{kind}-{world_size}-{i}")
    parts = local_parts(actor.chunks) if world_size == 1 else []
    stats = actor.train_step(my_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
    return (
        scores and [score.logprobs_T for score in scores],
        ps.get_data_parallel_rank(),
        stats,
        boxed_gradients(actor),
        parts,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, kinds: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for kind in {*kinds, *WITH_MTP}:
        drafting = {"num_nextn_predict_layers": 1} if kind in WITH_MTP else {}
        write_model(name_family(kind), folder / kind, **drafting)
    for kind in WITH_MTP:
        add_tensors(folder / kind, *BESIDE)
    return folder


def add_tensors(hf_dir: Path, *names: str) -> None:
    """Add tensors that transformers does not save: layers for multi-token prediction."""
    path = hf_dir / "model.safetensors"
    more = {name: torch.randn(8, 64, dtype=torch.bfloat16) for name in names}
    save_file(load_file(path) | more, path, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def kinds(request: pytest.FixtureRequest) -> list[str]:
    """Families that a test of this run asks for."""
    return sorted(set(chosen_cases(request, "kind")) or QUICK)


@pytest.fixture(scope="module")
def whole(folder: Path, kinds: list[str]) -> dict[str, Any]:
    """Results of one process, by family."""
    cases = run_each(run_case, 1, [(kind, 0, {}) for kind in kinds], folder)
    return {kind: case for kind, (case,) in zip(kinds, cases, strict=True)}


@pytest.fixture(scope="module")
def cut(folder: Path, kinds: list[str]) -> Mapping[tuple[str, int], list[Any]]:
    """Results of four processes in rank order, by family and number of the layout."""
    cases = [(kind, i, layout) for kind in kinds for i, layout in enumerate(LAYOUTS[kind])]
    results = run_each(run_case, 4, cases, folder)
    return {(kind, i): ranks for (kind, i, _), ranks in zip(cases, results, strict=True)}


@pytest.mark.gloo
@CHOSEN
def test_layouts_compute_what_transformers_does(
    folder: Path, whole: Any, cut: Any, kind: str
) -> None:
    wanted = transformers_logprobs(folder / kind)
    stats, gradients = whole[kind][2], whole_gradients(whole[kind][3])
    cases = [
        ({}, [whole[kind]]),
        *((layout, cut[kind, i]) for i, layout in enumerate(LAYOUTS[kind])),
    ]
    for layout, ranks in cases:
        owners = {dp: (found, step) for found, dp, step, *_ in ranks if found is not None}
        assert len(owners) == ParallelConfig(**layout).dp_size, layout
        error = max(
            float((got - want).abs().max())
            for dp, (found, _) in owners.items()
            for got, want in zip(found, wanted[dp :: len(owners)], strict=True)
        )
        assert error < 1e-5, layout
        for _, step in owners.values():
            assert step.loss == pytest.approx(stats.loss, abs=1e-6), layout
            assert step.grad_norm == pytest.approx(stats.grad_norm, rel=1e-5), layout
        family = name_family(kind)
        tolerance = find_tolerance(family, TOLERANCE)
        check_gradients([rank[3] for rank in ranks], gradients, (kind, layout), tolerance)
        models_table.record(family, models_table.MEGATRON, layout, error)


@pytest.mark.gloo
@CHOSEN
def test_weights_come_back_byte_for_byte(folder: Path, whole: Any, cut: Any, kind: str) -> None:
    source = load_file(folder / kind / "model.safetensors")
    exports = [
        folder / f"{kind}-1-0",
        *(folder / f"{kind}-4-{i}" for i in range(len(LAYOUTS[kind]))),
    ]
    for export in exports:
        exported = {}
        for file in export.glob("*.safetensors"):
            exported |= load_file(file)
        assert exported.keys() == source.keys()
        for name, tensor in source.items():
            assert exported[name].dtype == tensor.dtype
            assert torch.equal(exported[name], tensor), (export.name, name)


def test_tensors_beside_the_model_are_found_by_name_and_no_others_are_allowed(
    folder: Path, tmp_path: Path
) -> None:
    for kind in WITH_MTP:
        model = ModelFacts.read(folder / kind)
        assert list_carried_tensors(model.path, model.config).keys() == set(BESIDE)
        assert not set(BESIDE) & open_hf_dir(model).keys()
    add_tensors(write_model("llama", tmp_path), BESIDE[0])
    with pytest.raises(
        ValueError, match=r"'model.layers.4.eh_proj.weight' has no place in the model"
    ):
        open_hf_dir(ModelFacts.read(tmp_path))


def corruptions(rule: Rule) -> Iterator[tuple[tuple[Rule, ...], str]]:
    """Yield wrong replacements of `rule` in a table, and the error message of each."""
    yield (), "is not in the table"
    yield (replace(rule, tensors=tuple(map(resize, rule.tensors))),), "has shape"
    if rule.where in ("dense", "moe"):
        yield (
            (replace(rule, where="moe" if rule.where == "dense" else "dense"),),
            "is not a (moe|dense) layer",
        )


def resize(tensor: HfTensor) -> HfTensor:
    """Return the tensor with another size of its last axis, or of the part that a rule takes."""
    if tensor.section is not None and len(tensor.axes) == 1:
        return replace(tensor, section=replace(tensor.section, rows="vocab"))
    return replace(tensor, axes=(*tensor.axes[:-1], "vocab"))


def test_every_corruption_of_a_table_is_noticed(folder: Path, whole: dict[str, Any]) -> None:
    for kind, (*_, parts) in whole.items():
        config = read_hf_config(folder / kind)
        family = family_of(config)
        keys = {family.find(part.key)[0].key for part in parts}
        for i, rule in enumerate(family.rules):
            for corrupted, message in corruptions(rule) if rule.key in keys else ():
                rules = (*family.rules[:i], *corrupted, *family.rules[i + 1 :])
                with pytest.raises(ValueError, match=message):
                    make_training_shards(parts, replace(family, rules=rules), config)
