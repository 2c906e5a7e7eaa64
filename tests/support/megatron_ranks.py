"""Real Megatron ranks, as the trainer of a loop and of a SyncController.

Their weights are also gathered by Megatron and torch alone, and named and split here by hand: an
oracle for `mcore_rl.weights`.
"""

import asyncio
import gc
import multiprocessing as mp
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.algo.policy_loss import TokenLoss, make_policy_loss
from mcore_rl.config import Config
from mcore_rl.process.network import find_free_port
from mcore_rl.train.actor import Actor
from mcore_rl.train.runtime import init_distributed, rank_coordinate
from mcore_rl.types import LogprobOptions, StepStats, TokenScores, TrainBatch
from mcore_rl.weight_sync.packed_experts import PackedExperts
from mcore_rl.weight_sync.sender import WeightSender
from mcore_rl.weight_sync.wire import Link, Report
from mcore_rl.weights.lora.places import Content
from mcore_rl.weights.models import hf_tensor_shapes
from tests.support.distributed import PRELOAD
from tests.support.rank_calls import answer_calls
from tests.support.saved import saved_tensors
from tests.support.trainer_processes import ProcessRanks


class MegatronRanks(ProcessRanks):
    """RankCalls of a PackedTokenTrainer and TrainerRanks of a SyncController, in processes."""

    def __init__(self, world_size: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.world_size = world_size
        self._pipes = []
        self.processes = []
        port = find_free_port("127.0.0.1")
        for rank in range(world_size):
            own_end, child_end = context.Pipe()
            process = context.Process(
                target=_serve, args=(child_end, rank, world_size, port), daemon=True
            )
            process.start()
            child_end.close()
            self._pipes.append(own_end)
            self.processes.append(process)

    def call(self, method: str, *args: Any) -> list[Any]:
        return asyncio.run(self._call_all(method, *args))

    def build(self, config: Config) -> None:
        """Build a new actor of the recipe, whose layout has one rank per process."""
        self.call("build", config)

    def compute_logprobs(
        self, per_dp: Sequence[Sequence[TrainBatch]], options: LogprobOptions
    ) -> list[list[TokenScores]]:
        return _owner_answers(self.call("compute_logprobs", per_dp, options))

    def train_step(
        self, per_dp: Sequence[Sequence[TrainBatch]], *, temperature: float, num_tokens: int
    ) -> StepStats:
        return _owner_answers(self.call("train_step", per_dp, temperature, num_tokens))[0]

    def save(self, folder: str | Path, extra: dict[str, Any]) -> None:
        self.call("save", Path(folder), extra)

    def finish_save(self) -> None:
        self.call("finish_save")


def _owner_answers(answers: Sequence[Any]) -> list[Any]:
    """The answers that are not None, by data-parallel coordinate, which grows with the rank."""
    return [answer for answer in answers if answer is not None]


class _MegatronRank:
    _actor: Actor
    _loss: TokenLoss
    _sender: WeightSender

    def __init__(self, rank: int, world_size: int, port: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._port = port

    def build(self, config: Config) -> None:
        init_distributed(
            self._rank,
            self._world_size,
            "127.0.0.1",
            self._port,
            config.parallel,
            seed=0,
            timeout_s=60,
        )
        train = config.train
        self._actor = Actor(
            config.model, config.parallel, train, train.optimizer, config.run.steps, seed=0
        )
        self._loss = make_policy_loss(config.algorithm)
        drafts = config.rollout.speculate == "mtp"
        shards, tensors = self._actor.select_served_layout(drafts=drafts)
        self._swap_in: Any = nullcontext
        if config.rollout.quantization == "int4":
            shapes = hf_tensor_shapes(self._actor.hf_config)
            packed = PackedExperts(shards, tensors, shapes, self._rank)
            shards, tensors, self._swap_in = packed.shards, packed.tensors, packed.swap_in
        self._sender = WeightSender(
            shards,
            tensors,
            self._rank,
            adapter=self._actor.adapter_layouts(),
            unadapted=self._actor.without_adapter,
            adapters=self._actor.list_adapter_factors(),
        )

    def choose_adapter(self, name: str) -> None:
        self._actor.choose_adapter(name)

    def compute_logprobs(
        self, per_dp: Sequence[Sequence[TrainBatch]], options: LogprobOptions
    ) -> list[TokenScores] | None:
        return self._actor.compute_logprobs(per_dp[rank_coordinate().dp], options)

    def train_step(
        self, per_dp: Sequence[Sequence[TrainBatch]], temperature: float, num_tokens: int
    ) -> StepStats | None:
        own = per_dp[rank_coordinate().dp]
        return self._actor.train_step(
            own, self._loss, temperature=temperature, num_tokens=num_tokens
        )

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        self._actor.save(folder, extra)

    def finish_save(self) -> None:
        self._actor.finish_save()

    def describe(self, content: Content) -> bytes:
        return self._sender.describe(content)

    def plan_links(self, offers: Sequence[tuple[Link, bytes]]) -> list[bytes]:
        return self._sender.plan_links(offers)

    def open_links(self, verdicts: Sequence[tuple[str, str]]) -> list[str | Report]:
        return self._sender.open_links(verdicts)

    def connect(self, link: Link) -> Report:
        return self._sender.connect(link)

    def send(self, version: int, engines: Sequence[str], timeout_s: float) -> dict[str, Report]:
        with self._swap_in():
            return self._sender.send(version, engines, timeout_s)

    def publish_sums(self, version: int, engines: Sequence[str]) -> None:
        self._sender.publish_sums(version, engines)


def _serve(pipe: Any, rank: int, world_size: int, port: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    gc.freeze()
    torch.set_num_threads(1)
    served = _MegatronRank(rank, world_size, port)
    answer_calls(pipe, served)


def hf_weights_of(checkpoint: Path, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """A Megatron checkpoint's weights by HF name: assembled by torch, named and split by hand."""
    model = saved_tensors(checkpoint, r"(embedding|decoder|output_layer|visual)\.")
    weights = dict(_hf_tensors(model, config))
    prefixes = PREFIXES.get(config["architectures"][0], {})
    renamed = {}
    for name, tensor in weights.items():
        prefix = next((each for each in prefixes if name.startswith(each)), "")
        renamed[prefixes.get(prefix, "") + name.removeprefix(prefix)] = tensor
    return renamed


BESIDE_TOWER = {"visual.": "model.visual.", "model.": "model.language_model."}
PREFIXES = {
    "NemotronHForCausalLM": {
        "model.embed_tokens.": "backbone.embeddings.",
        "model.norm.": "backbone.norm_f.",
        "model.layers.": "backbone.layers.",
    },
    "Glm4vMoeForConditionalGeneration": BESIDE_TOWER,
    "Qwen3VLForConditionalGeneration": BESIDE_TOWER,
    "Qwen3VLMoeForConditionalGeneration": BESIDE_TOWER,
    "Qwen3_5ForConditionalGeneration": BESIDE_TOWER,
    "Qwen3_5MoeForConditionalGeneration": BESIDE_TOWER,
    "KimiK25ForConditionalGeneration": {
        "visual.merger.pre_norm.": "mm_projector.pre_norm.",
        "visual.merger.linear_1.": "mm_projector.proj.0.",
        "visual.merger.linear_2.": "mm_projector.proj.2.",
        "visual.patch_embed.": "vision_tower.patch_embed.",
        "visual.": "vision_tower.encoder.",
        "": "language_model.",
    },
    "KimiVLForConditionalGeneration": {
        "visual.merger.": "multi_modal_projector.",
        "visual.patch_embed.": "vision_tower.patch_embed.",
        "visual.": "vision_tower.encoder.",
        "": "language_model.",
    },
}
"""Architecture -> beginnings of names -> those of its checkpoint; the first that fits counts."""
UPRIGHT = "Qwen3_5MoeForConditionalGeneration"
STACKING = {"GptOssForCausalLM", "Qwen3VLMoeForConditionalGeneration", UPRIGHT}
"""Architectures whose HF tensors hold all experts of a layer."""
MODEL_NAMES = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "decoder.final_norm.weight": "model.norm.weight",
}
HYBRID_LAYER = {
    "mixer.in_proj.layer_norm_weight": "norm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "norm.weight",
    "self_attention.linear_proj.weight": "mixer.o_proj.weight",
    "mlp.linear_fc1.layer_norm_weight": "norm.weight",
    "pre_mlp_layernorm.weight": "norm.weight",
    "mlp.router.weight": "mixer.gate.weight",
    "mlp.router.expert_bias": "mixer.gate.e_score_correction_bias",
    "mlp.": "mixer.",
    "experts.experts.": "experts.",
    "linear_fc1": "up_proj",
    "linear_fc2": "down_proj",
}
"""Parts of Megatron's keys within a layer of a hybrid model -> those of HF names, in this order."""
LAYER_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "self_attention.core_attention.softmax_offset": "self_attn.sinks",
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    **{
        f"self_attention.core_attention.indexer.{key}": f"self_attn.indexer.{name}"
        for key, name in (
            ("linear_wq_b.weight", "wq_b.weight"),
            ("linear_wk.weight", "wk.weight"),
            ("k_norm.weight", "k_norm.weight"),
            ("k_norm.bias", "k_norm.bias"),
            ("linear_weights_proj.weight", "weights_proj.weight"),
        )
    },
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "self_attention.A_log": "linear_attn.A_log",
    "self_attention.dt_bias": "linear_attn.dt_bias",
    "self_attention.out_norm.weight": "linear_attn.norm.weight",
    "self_attention.out_proj.weight": "linear_attn.out_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.bias": "mlp.router.bias",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}
NUMBERED = {
    "mlp.gate.e_score": "block_sparse_moe.e_score",
    "mlp.": "block_sparse_moe.",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}
STACKED = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj", ".weight": "", ".bias": "_bias"}
ONE_SHARED_EXPERT = {"mlp.shared_experts.": "mlp.shared_expert."}
NORMED_LATENTS = {"self_attn.q_norm.": "self_attn.q_a_layernorm."}
OTHER_NAMES = {
    "DeepseekV32ForCausalLM": NORMED_LATENTS,
    "GlmMoeDsaForCausalLM": NORMED_LATENTS,
    "GptOssForCausalLM": {"mlp.gate.weight": "mlp.router.weight"},
    "HYV3ForCausalLM": {
        "mlp.gate.weight": "mlp.router.gate.weight",
        "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
        "mlp.shared_experts.": "mlp.shared_mlp.",
    },
    "MixtralForCausalLM": NUMBERED,
    "MiniMaxM2ForCausalLM": NUMBERED,
    "Qwen2MoeForCausalLM": ONE_SHARED_EXPERT,
    "Qwen3NextForCausalLM": ONE_SHARED_EXPERT,
    "Qwen3_5MoeForCausalLM": ONE_SHARED_EXPERT,
    UPRIGHT: ONE_SHARED_EXPERT,
}
"""Architecture -> replacements in HF names, made in this order."""


def _hf_tensors(
    model: Mapping[str, Tensor], config: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    is_hybrid = "mamba_num_heads" in config
    joined = _join_mamba(model) if is_hybrid else _join_delta_nets(model, config)
    for key, tensor in joined.items():
        if key in MODEL_NAMES:
            yield MODEL_NAMES[key], tensor[: config["vocab_size"]] if "norm" not in key else tensor
            continue
        if key.startswith("visual."):
            yield key, tensor
            continue
        match = re.fullmatch(r"decoder\.layers\.(?:(\d+)\.)?(.*)", key)
        assert match, key
        layers = tensor[None] if match[1] else tensor
        for i, layer in enumerate(layers, start=int(match[1] or 0)):
            make = _hybrid_layer_tensors if is_hybrid else _layer_tensors
            for name, part in make(match[2], layer, config):
                for usual, other in OTHER_NAMES.get(config["architectures"][0], {}).items():
                    name = name.replace(usual, other)
                yield f"model.layers.{i}.{name}", part.contiguous()


def _join_delta_nets(model: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the model with the parts of delta nets' tensors joined, under HF names in a layer."""
    joined = dict(model)
    parts: dict[tuple[str, str], dict[str, Tensor]] = defaultdict(dict)
    for key in model:
        if match := re.fullmatch(r"(.*\.)self_attention\.(in_proj|conv1d)\.weight\.(\w+)", key):
            parts[match[1], match[2]][match[3]] = joined.pop(key)
    for (layer, module), named in parts.items():
        qkv = torch.cat([named[name] for name in ("query", "key", "value")])
        if module == "conv1d":
            tensors = {"conv1d": qkv}
        elif config["architectures"] == ["Qwen3NextForCausalLM"]:
            rows = {
                n: t.unflatten(0, (config["linear_num_key_heads"], -1)) for n, t in named.items()
            }
            qkvz = torch.cat([rows[name] for name in ("query", "key", "value", "z")], 1)
            ba = torch.cat([rows["beta"], rows["alpha"]], 1)
            tensors = {"in_proj_qkvz": qkvz.flatten(0, 1), "in_proj_ba": ba.flatten(0, 1)}
        else:
            tensors = {"in_proj_qkv": qkv, "in_proj_z": named["z"]}
            tensors |= {"in_proj_b": named["beta"], "in_proj_a": named["alpha"]}
        joined |= {f"{layer}linear_attn.{name}.weight": t for name, t in tensors.items()}
    return joined


def _join_mamba(model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the model with the parts of Mamba-2 layers' tensors joined."""
    joined = dict(model)
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key in model:
        if match := re.fullmatch(r"(.*\.mixer\.(?:in_proj|conv1d)\.\w+)\.(z|x|B|C|dt)", key):
            parts[match[1]][match[2]] = joined.pop(key)
    for key, named in parts.items():
        joined[key] = torch.cat([named[x] for x in ("z", "x", "B", "C", "dt") if x in named])
    return joined


def _hybrid_layer_tensors(
    key: str, tensor: Tensor, config: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    if key == "self_attention.linear_qkv.weight":
        for name, part in _layer_tensors(key, tensor, config):
            yield name.replace("self_attn", "mixer"), part
        return
    for usual, other in HYBRID_LAYER.items():
        key = key.replace(usual, other)
    if key.startswith("mixer.experts."):
        for expert, matrix in enumerate(tensor):
            yield key.replace("experts.", f"experts.{expert}.", 1), matrix
    else:
        yield key, tensor


def _layer_tensors(
    key: str, tensor: Tensor, config: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    if key in LAYER_NAMES:
        yield LAYER_NAMES[key], tensor
    elif key.startswith("linear_attn."):
        yield key, tensor
    elif key.startswith("self_attention.linear_qkv."):
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        groups = tensor.unflatten(0, (config["num_key_value_heads"], -1, head_dim))
        queries = groups[:, :-2]
        if "linear_num_key_heads" in config:  # with a gate behind the queries of each head
            queries = torch.stack(queries.chunk(2, 1), 2).flatten(1, 2)
        for name, rows in (("q", queries), ("k", groups[:, -2:-1]), ("v", groups[:, -1:])):
            yield f"self_attn.{name}_proj.{key.rpartition('.')[2]}", rows.flatten(0, 2)
    elif key.startswith("mlp.experts.experts.") and config["architectures"][0] in STACKING:
        name = key.removeprefix("mlp.experts.experts.")
        for usual, other in STACKED.items():
            name = name.replace(usual, other)
        upright = config["architectures"] == [UPRIGHT]
        yield f"mlp.experts.{name}", tensor if upright else tensor.transpose(1, -1)
    elif key.startswith("mlp.experts.experts."):
        for expert, matrix in enumerate(tensor):
            for name, part in _mlp(key.removeprefix("mlp.experts.experts."), matrix):
                yield f"mlp.experts.{expert}.{name}", part
    else:
        prefix = "mlp.shared_experts." if "shared_experts" in key else "mlp."
        for name, part in _mlp(key.removeprefix(prefix), tensor):
            yield prefix + name, part


def _mlp(key: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if key == "linear_fc2.weight":
        yield "down_proj.weight", tensor
        return
    assert key == "linear_fc1.weight", key
    gate, up = tensor.chunk(2)
    yield "gate_proj.weight", gate
    yield "up_proj.weight", up
