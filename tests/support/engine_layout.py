"""An engine rank of a small Qwen3-MoE with parameters and `load_weights` laid out as in SGLang.

Run on real weights it is the oracle for what the same loader, traced, says.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class EngineRank:
    """One tensor-parallel rank: stacked qkv and gate_up, fused experts, padded vocabulary.

    With `ep` > 1 the experts are dealt out to groups of tp // ep ranks, which split each expert.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        rank: int = 0,
        tp: int = 1,
        ep: int = 1,
        dtype: torch.dtype = torch.int64,
    ) -> None:
        self.config, self.rank, self.tp = config, rank, tp
        self.ep_rank, self.ep, self.moe_tp = rank // (tp // ep), ep, tp // ep
        self.moe_rank = rank % self.moe_tp
        self.params: dict[str, Tensor] = {}
        hidden, head_dim, vocab = config["hidden_size"], config["head_dim"], config["vocab_size"]
        self.q_len = config["num_attention_heads"] // tp * head_dim
        self.kv_len = max(config["num_key_value_heads"] // tp, 1) * head_dim
        self.vocab_len = -(-vocab // (4 * tp)) * 4
        shapes = {
            "model.embed_tokens.weight": (self.vocab_len, hidden),
            "model.norm.weight": (hidden,),
        }
        if not config["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (self.vocab_len, hidden)
        for layer in range(config["num_hidden_layers"]):
            in_layer = self._layer_shapes(layer)
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in in_layer.items()}
        for name, shape in shapes.items():
            self.params[name] = torch.nn.Parameter(
                torch.full(shape, -1, dtype=dtype), requires_grad=False
            )

    def _layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        config, hidden, head_dim = self.config, self.config["hidden_size"], self.config["head_dim"]
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.qkv_proj.weight": (self.q_len + 2 * self.kv_len, hidden),
            "self_attn.q_norm.weight": (head_dim,),
            "self_attn.k_norm.weight": (head_dim,),
            "self_attn.o_proj.weight": (hidden, self.q_len),
        }
        if layer in config["mlp_only_layers"]:
            ffn = config["intermediate_size"] // self.tp
            return shapes | {
                "mlp.gate_up_proj.weight": (2 * ffn, hidden),
                "mlp.down_proj.weight": (hidden, ffn),
            }
        local, ffn = (
            config["num_experts"] // self.ep,
            config["moe_intermediate_size"] // self.moe_tp,
        )
        return shapes | {
            "mlp.gate.weight": (config["num_experts"], hidden),
            "mlp.experts.w13_weight": (local, 2 * ffn, hidden),
            "mlp.experts.w2_weight": (local, hidden, ffn),
        }

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, loaded in weights:
            if ".experts." in name:
                self._load_expert(name, loaded)
            elif any(f".{x}_proj." in name for x in ("q", "k", "v")):
                self._load_qkv(name, loaded)
            elif ".gate_proj." in name or ".up_proj." in name:
                self._load_gate_up(name, loaded)
            elif name in ("model.embed_tokens.weight", "lm_head.weight"):
                self._load_vocab(self.params[name], loaded)
            else:
                self._load_plain(self.params[name], loaded)

    def _load_expert(self, name: str, loaded: Tensor) -> None:
        prefix, expert, projection = (
            name.split(".experts.")[0],
            *name.split(".experts.")[1].split(".")[:2],
        )
        w = self.params[f"{prefix}.experts.{'w2' if projection == 'down_proj' else 'w13'}_weight"]
        local = int(expert) - self.ep_rank * len(w)
        if not 0 <= local < len(w):
            return
        axis = 1 if projection == "down_proj" else 0
        size = loaded.shape[axis] // self.moe_tp
        target = w.data[local].narrow(axis, size if projection == "up_proj" else 0, size)
        target.copy_(loaded.narrow(axis, self.moe_rank * size, size))

    def _load_qkv(self, name: str, loaded: Tensor) -> None:
        which = name.split("_proj.")[0][-1]
        param = self.params[name.replace(f"{which}_proj", "qkv_proj")]
        start = {"q": 0, "k": self.q_len, "v": self.q_len + self.kv_len}[which]
        size = self.q_len if which == "q" else self.kv_len
        replicas = max(self.tp // self.config["num_key_value_heads"], 1)
        shard = self.rank if which == "q" else self.rank // replicas
        param.data.narrow(0, start, size).copy_(loaded.narrow(0, shard * size, size))

    def _load_gate_up(self, name: str, loaded: Tensor) -> None:
        which = "gate" if ".gate_proj." in name else "up"
        param = self.params[name.replace(f".{which}_proj.", ".gate_up_proj.")]
        ffn = len(param) // 2
        target = param.data.narrow(0, ffn if which == "up" else 0, ffn)
        target.copy_(loaded.narrow(0, self.rank * ffn, ffn))

    def _load_vocab(self, param: Tensor, loaded: Tensor) -> None:
        start = min(self.rank * self.vocab_len, len(loaded))
        stop = min(start + self.vocab_len, len(loaded))
        param[: stop - start].data.copy_(loaded.narrow(0, start, stop - start))
        param[stop - start :].data.fill_(0)

    def _load_plain(self, param: Tensor, loaded: Tensor) -> None:
        if param.shape != loaded.shape:
            size = param.shape[1]
            loaded = loaded.narrow(1, self.rank * size, size)
        param.data.copy_(loaded)
