"""bfloat16 Megatron ranks to the INT4 experts of SGLang's own models, byte for byte.

For comparison SGLang itself loads a checkpoint, whose experts compressed-tensors has quantized from
weights that Megatron gathered, into parameters in SGLang's own order.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import Tensor

from mcore_rl.config import (
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    TrainConfig,
)
from mcore_rl.planning.deployment import record_layouts
from mcore_rl.weight_sync.link_store import LinkStore
from mcore_rl.weight_sync.wire import Link
from mcore_rl.weights.hf.config import ModelFacts, read_hf_config
from mcore_rl.weights.hf.int4 import QUANTIZATION_CONFIG
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from tests.support.engine_ranks import EngineRanks
from tests.support.int4_oracle import compress_with_library
from tests.support.megatron_ranks import MegatronRanks, hf_weights_of
from tests.support.tiny_glm4v import write_glm4v_model
from tests.support.tiny_kimi_vl import write_kimi_k25_model, write_kimi_vl_model
from tests.support.tiny_models import write_model
from tests.support.tiny_training import NUM_TOKENS, make_batches

pytestmark = pytest.mark.gloo

TIMEOUT_S = 60.0
LAYOUTS: dict[str, dict[str, Any]] = {
    "mixtral": {"tp": 2, "pp": 2, "ep": 2},
    "qwen3_moe": {"tp": 4, "ep": 4},
    "qwen3_next": {"tp": 2, "pp": 2, "ep": 2, "etp": 1},
    "deepseek_v3": {"pp": 2, "cp": 2, "ep": 2},
    "glm4_moe": {"tp": 4, "ep": 2, "etp": 2},
    "kimi_k25": {"tp": 2, "pp": 2, "ep": 2},
    "kimi_vl": {"tp": 2, "pp": 2, "ep": 2},
    "glm4v_moe": {"tp": 2, "pp": 2, "ep": 2},
}
"""Kind of model -> the trainer's layout."""
ENGINES: dict[str, dict[str, Any]] = {"mixtral": {"tp": 2}, "glm4_moe": {"tp": 2}}
"""Kind of model -> the engine's, by default with expert parallelism."""
EXPERTS = re.compile(r".*\.experts\.\d+\.\w+\.weight")
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
"""Experts have 64 columns in one direction and 128 in the other."""
WITH_TOWER: dict[str, Callable[..., Path]] = {
    "kimi_k25": write_kimi_k25_model,
    "kimi_vl": write_kimi_vl_model,
    "glm4v_moe": write_glm4v_model,
}
"""Kind of a model that sees images -> its writer."""
WIDTHS = {"mixtral": "intermediate_size"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[MegatronRanks]:
    ranks = MegatronRanks(4)
    yield ranks
    ranks.stop()


def make_dirs(kind: str, folder: Path) -> tuple[Path, Path]:
    """The trainer's model directory, and config.json of the same model for the engine."""
    sizes = {**SIZES, WIDTHS.get(kind, "moe_intermediate_size"): 128}
    if kind in WITH_TOWER:
        hf_dir = WITH_TOWER[kind](folder / "hf", **sizes)
    else:
        hf_dir = write_model(kind, folder / "hf", **sizes)
    int4_dir = folder / "int4"
    int4_dir.mkdir()
    config = json.loads((hf_dir / "config.json").read_text())
    served = {**config, "dtype": "bfloat16", "quantization_config": QUANTIZATION_CONFIG}
    (int4_dir / "config.json").write_text(json.dumps(served))
    return hf_dir, int4_dir


def quantize_gathered(ranks: MegatronRanks, hf_dir: Path, folder: Path) -> tuple[Path, int]:
    """A checkpoint of the trainer's weights with experts in INT4, made by compressed-tensors.

    Also the number of its experts' matrices.
    """
    ranks.save(folder / "megatron", {})
    ranks.finish_save()
    config = read_hf_config(hf_dir)
    tensors: dict[str, Tensor] = {}
    num_packed = 0
    for name, weight in hf_weights_of(folder / "megatron", config).items():
        if EXPERTS.fullmatch(name):
            parts = compress_with_library(weight)
            tensors |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
            num_packed += 1
        else:
            tensors[name] = weight
    save_file(tensors, folder / "expected.safetensors")
    return folder / "expected.safetensors", num_packed


def make_config(hf_dir: Path, layout: Mapping[str, Any]) -> Config:
    return Config(
        model=ModelConfig(path=str(hf_dir), dtype="bfloat16"),
        parallel=ParallelConfig(**layout),
        train=TrainConfig(optimizer=OptimizerConfig(lr=1e-3)),
        rollout=RolloutConfig(quantization="int4"),
    )


def make_link(store: LinkStore, config: Config, engine: Mapping[str, Any]) -> Link:
    policy = ModelFacts.read(config.model.path)
    layouts = record_layouts(
        policy, "bfloat16", config.parallel, SGLangSizes(**engine), quantization="int4"
    )
    link = Link(
        *("int4", "127.0.0.1", store.port, store.key),
        *(4, engine["tp"], 1 << 14, TIMEOUT_S),
        layouts=layouts.encode(),
    )
    store.keep(link)
    return link


def connect(ranks: MegatronRanks, engine: EngineRanks, link: Link) -> list[dict[str, Any]]:
    engine.ask(link=asdict(link))
    reports = [asdict(report) for report in ranks.call("connect", link)]
    return reports + engine.answers()


def errors_of(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    return [report["error"] for report in reports if report["error"] is not None]


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k != "deepseek_v3")) for k in LAYOUTS]
)
def test_experts_are_those_of_a_checkpoint_quantized_from_a_gather(
    ranks: MegatronRanks, tmp_path: Path, kind: str
) -> None:
    hf_dir, int4_dir = make_dirs(kind, tmp_path)
    sizes = ENGINES.get(kind, {"tp": 2, "ep": 2})
    engine = EngineRanks(int4_dir, sizes)
    try:
        config = make_config(hf_dir, LAYOUTS[kind])
        ranks.build(config)
        ranks.train_step([make_batches()], temperature=1.0, num_tokens=NUM_TOKENS)
        expected, num_packed = quantize_gathered(ranks, hf_dir, tmp_path)
        assert num_packed > 0
        stores = [LinkStore.serve("127.0.0.1", TIMEOUT_S) for _ in range(2)]
        links = [make_link(store, config, sizes) for store in stores]
        links[1] = replace(links[1], layouts="")
        for version, (link, agreed) in enumerate(
            zip(links, ["recorded", "listed"], strict=True), start=1
        ):
            reports = connect(ranks, engine, link)
            assert not errors_of(reports)
            assert {report["digest"].split()[0] for report in reports} == {agreed}
            engine.ask(link=asdict(link), version=version)
            sent = ranks.call("send", version, ["int4"], TIMEOUT_S)
            received = engine.answers()
            assert not errors_of([asdict(report["int4"]) for report in sent] + received)
            assert sum(report["int4"].num_bytes for report in sent) == sum(
                report["num_bytes"] for report in received
            )
        engine.ask(expected=str(expected))
        for answer in engine.answers():
            assert answer["differ"] == []
            assert answer["num_quantized"] > 0
    finally:
        engine.stop()
