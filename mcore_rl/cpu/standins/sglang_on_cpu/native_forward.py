"""Runs a decoder's forward pass in one call of compiled code, not in 40 torch calls a layer.

Takes SGLang's batch, returns the normalized hidden states [T, H], and writes the KV cache.
"""

import ctypes
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcore_rl.device.native import find_set_threads, find_sgemm, load
from sglang_on_cpu.native_layers import Decoder, Layer, UnsupportedError, read_decoder

MAX_PREFILL_PAIRS = 2**21
"""Largest number of pairs of a query and a key, for which prefill runs here. Beyond, torch's
attention with its blocks of queries is faster."""
PLAIN_SERVER = {
    "tp_size": 1,
    "pp_size": 1,
    "enable_lora": None,
    "speculative_algorithm": None,
    "expert_distribution_recorder_mode": None,
    "enable_hierarchical_cache": False,
    "enable_eplb": False,
    "kv_cache_dtype": "auto",
    "is_embedding": False,
}
"""Fields of SGLang's ServerArgs, with the values at which forward.c does all that SGLang does."""
_LOG = logging.getLogger(__name__)


class _Batch(ctypes.Structure):
    """batch_t of native/forward.c."""

    _fields_ = (
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("ids", "positions", "slots", "requests")),
        *((name, ctypes.c_void_p) for name in ("table", "cos_sin")),
    )


_INTEGERS = ("expert", "row", "start")
_ROWS = ("in", "gate_up", "act", "out")


class _Space(ctypes.Structure):
    """space_t of native/forward.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("normed", "qkv", "mixed", "scores")),
        ("scores_size", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("router", "weight", *_INTEGERS, *_ROWS)),
    )


class NativeForward:
    """Replaces `forward` of the model within SGLang's, where batches that it does not take go.

    runner     SGLang's ModelRunner, whose KV cache is written
    in_torch   the model's own forward
    """

    def __init__(self, runner: Any, decoder: Decoder, library: ctypes.CDLL, sgemm: Any) -> None:
        self.runner = runner
        self.decoder = decoder
        self.in_torch: Callable[..., Tensor] = runner.model.model.forward
        self._call = library.forward
        self._call.restype = None
        self._sgemm = sgemm
        # Small products must start no threads, which would cost more than they save.
        decoder.shape.threads = torch.get_num_threads() if find_set_threads() is not None else 1
        self._layers = (Layer * len(decoder.layers))()
        self._space = _Space()
        self._buffers: dict[str, Tensor] = {}
        self._max_tokens = 0
        self._addresses: list[int] = []
        self._weights = [(weight.module._parameters, weight.name) for weight in decoder.weights()]

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: object = None,
    ) -> Tensor:
        if input_embeds is not None or not self.takes(forward_batch):
            return self.in_torch(
                input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors
            )
        table = self.runner.req_to_token_pool.req_to_token
        tokens = len(input_ids)
        chosen = self._prepare(tokens, table)
        requests = forward_batch.req_pool_indices
        if not forward_batch.forward_mode.is_decode():
            requests = requests.repeat_interleave(forward_batch.extend_seq_lens)
        arrays = [x.long() for x in (input_ids, positions, forward_batch.out_cache_loc, requests)]
        hidden = torch.empty(tokens, self.decoder.shape.hidden)
        batch = _Batch(tokens, *(x.data_ptr() for x in (*arrays, table, self.decoder.cos_sin)))
        self._call(
            self._sgemm,
            find_set_threads(),
            ctypes.byref(self.decoder.shape),
            self._layers,
            ctypes.c_int64(len(self._layers)),
            ctypes.byref(batch),
            ctypes.byref(self._space),
            ctypes.c_void_p(self._addresses[0]),
            ctypes.c_void_p(self._addresses[1]),
            ctypes.c_void_p(hidden.data_ptr()),
        )
        for layer, ids_TK in chosen.items():
            capturer().capture(layer, ids_TK)
        return hidden

    def takes(self, forward_batch: Any) -> bool:
        """Return whether the batch decodes, or prefills short sequences of plain requests."""
        mode = forward_batch.forward_mode
        if mode.is_decode():
            return forward_batch.encoder_lens is None
        if not mode.is_extend() or forward_batch.encoder_lens is not None:
            return False
        lens = zip(forward_batch.extend_seq_lens_cpu, forward_batch.seq_lens_cpu, strict=True)
        return sum(int(queries) * int(keys) for queries, keys in lens) <= MAX_PREFILL_PAIRS

    def _prepare(self, tokens: int, table: Tensor) -> dict[int, Tensor]:
        """Fill the structures; return where each layer's chosen experts will be, if asked for."""
        addresses = [parameters[name].data_ptr() for parameters, name in self._weights]
        if addresses != self._addresses:
            self._addresses = addresses
            self._fill_layers()
        self.decoder.shape.table_stride = table.stride(0)
        if tokens > self._max_tokens:
            self._max_tokens = max(tokens, 2 * self._max_tokens)
            self._make_space(self._max_tokens, table.shape[1])
        chosen = {}
        if capturer() is not None:
            for index, layer in enumerate(self.decoder.layers):
                if layer.experts:
                    chosen[index] = torch.empty(tokens, layer.top_k, dtype=torch.int32)
                    self._layers[index].chosen = chosen[index].data_ptr()
        return chosen

    def _fill_layers(self) -> None:
        pool = self.runner.token_to_kv_pool
        for index, layer in enumerate(self.decoder.layers):
            filled = self._layers[index]
            for name, weight in layer.weights.items():
                setattr(filled, name, weight.tensor.data_ptr())
            filled.k_cache = pool.k_buffer[index].data_ptr()
            filled.v_cache = pool.v_buffer[index].data_ptr()
            for name in ("experts", "top_k", "normalize", "intermediate"):
                setattr(filled, name, getattr(layer, name))
        self.decoder.shape.slot_stride = pool.k_buffer[0].stride(0)

    def _make_space(self, tokens: int, longest: int) -> None:
        shape, layers = self.decoder.shape, self.decoder.layers
        experts = max(layer.experts for layer in layers)
        top_k = max(layer.top_k for layer in layers)
        intermediate = max(layer.intermediate for layer in layers)
        pairs = tokens * top_k
        q_size = shape.heads * shape.head_dim
        self._space.scores_size = shape.heads // shape.kv_heads * longest
        sizes = {
            "normed": tokens * shape.hidden,
            "qkv": tokens * (q_size + 2 * shape.kv_heads * shape.head_dim),
            "mixed": tokens * q_size,
            "scores": shape.threads * self._space.scores_size,
            "router": tokens * experts,
            "weight": pairs,
            "expert": pairs,
            "row": pairs,
            "start": experts + 1,
            "in": pairs * shape.hidden,
            "gate_up": pairs * 2 * intermediate,
            "act": pairs * intermediate,
            "out": pairs * shape.hidden,
        }
        for name, size in sizes.items():
            dtype = torch.int32 if name in _INTEGERS else torch.float32
            self._buffers[name] = torch.empty(size, dtype=dtype)
            setattr(self._space, name, self._buffers[name].data_ptr())


def run_in_compiled_code() -> None:
    """Run the decoders that native/forward.c knows in compiled code, where a C compiler is.

    The 40 small torch calls of a layer cost far more than what they compute: 70 % of a decode step
    of 32 requests. Log-probs agree within 1e-5 in float32; other models stay in torch.
    """
    from sglang.srt.model_executor.model_runner import ModelRunner

    sgemm = find_sgemm()
    library = None if sgemm is None else load("forward")
    if library is None:
        _LOG.warning("no C compiler: decoding runs in torch, which is slower for small models")
        return
    load_model = ModelRunner.load_model

    def load_and_replace(self: Any) -> None:
        load_model(self)
        try:
            check_server(self.server_args)
            decoder = read_decoder(self.model)
        except UnsupportedError as reason:
            _LOG.info("the forward pass runs in torch, as native code does not know %s", reason)
            return
        self.model.model.forward = NativeForward(self, decoder, library, sgemm)
        processor = self.model.logits_processor
        processor._compute_lm_head = NativeOutput(processor, library, sgemm, decoder.shape)
        threads = decoder.shape.threads
        _LOG.info(
            "the forward pass runs in compiled code on %d thread%s", threads, "s"[: threads > 1]
        )

    ModelRunner.load_model = load_and_replace


def check_server(server_args: Any) -> None:
    """Raise UnsupportedError for options whose forward pass does more than native/forward.c."""
    for name, value in PLAIN_SERVER.items():
        given = getattr(server_args, name)
        if given and given != value:
            raise UnsupportedError(f"{name}={given}")


def capturer() -> Any:
    """Return what records the chosen experts, or None if nobody asks for them."""
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    return get_global_experts_capturer()


class NativeOutput:
    """Replaces `_compute_lm_head` of SGLang's LogitsProcessor, which gets what it does not take.

    torch's library copies the weights into an order of its own at each product: a third of a
    decode step of SmolLM2.
    """

    def __init__(self, processor: Any, library: ctypes.CDLL, sgemm: Any, shape: Any) -> None:
        self.in_torch = processor._compute_lm_head
        self._call = library.output_layer
        self._call.restype = None
        self._most_rows = ctypes.c_int64.in_dll(library, "most_output_rows").value
        self._sgemm = sgemm
        self._shape = shape

    def __call__(
        self,
        hidden_states: Tensor,
        lm_head: Any,
        embedding_bias: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        weight = lm_head.weight
        if len(hidden_states) > self._most_rows or not are_plain(hidden_states, weight):
            return self.in_torch(hidden_states, lm_head, embedding_bias, out=out)
        logits = torch.empty(len(hidden_states), len(weight))
        self._call(
            self._sgemm,
            ctypes.byref(self._shape),
            *map(ctypes.c_int64, (len(hidden_states), *weight.shape)),
            *(ctypes.c_void_p(x.data_ptr()) for x in (hidden_states, weight, logits)),
        )
        return logits


def are_plain(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether compiled code reads both matrices as they lie in memory."""
    plain = all(x.dtype == torch.float32 and x.is_contiguous() for x in (hidden, weight))
    return plain and hidden.dim() == 2
