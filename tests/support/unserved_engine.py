"""One rank of an SGLang engine, most often with quantized weights, linked as in a run, but not
serving.

SGLang 0.5.23 serves FP8 on the CPU only with AMX. Model, parameters and loaders are its own, but
for the parameters of experts in INT4.
Arguments: JSON {"hf_dir", "sizes", "rank"}. Then each line of JSON on stdin is answered by one on
stdout:

{"link"}                         connect
{"link", "version"}              receive; over a staged link, swap in
{"expected": safetensors file}   name parameters that differ from what SGLang loads from the file;
                                 of experts in INT4, into parameters of its own
"""

# pyright: reportMissingImports=false

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from importlib import import_module
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from mcore_rl.device.sglang_setup import use_cpu
from mcore_rl.rollout.packed_experts import keep_words_in_order
from mcore_rl.rollout.server import use_our_classes
from mcore_rl.weight_sync.draft_model import list_loaded_parameters
from mcore_rl.weight_sync.receiver import (
    WeightReceiver,
    keep_on_calling_thread,
)
from mcore_rl.weight_sync.wire import Action, Command, Link
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from tests.support.sglang_layout_checks import engine_model

SCHEMES = "sglang.srt.layers.quantization.compressed_tensors.compressed_tensors"
OF_SGLANG_ALONE = ("_shape", "g_idx", "_sort_indices")
"""Ends of names of parameters that SGLang's own experts in INT4 have, and no sync fills."""


def main(hf_dir: str, sizes: dict[str, Any], rank: int) -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # SGLang prints
    use_our_classes(["--model-path", hf_dir])
    use_cpu([])
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.bfloat16)
    schemes: Any = import_module(SCHEMES)
    sglangs = schemes.CompressedTensorsWNA16TritonMoE
    keep_words_in_order()
    build = partial(engine_model, hf_dir, "bfloat16", SGLangSizes(**sizes), rank)
    with build() as model:
        receiver = WeightReceiver()
        tensors = list_loaded_parameters(model)
        spoil(tensors)
        load_weights = keep_on_calling_thread(model.load_weights)
        print("{}", file=answers, flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            if "expected" in request:
                found = {name: tensor.detach().clone() for name, tensor in tensors.items()}
                schemes.CompressedTensorsWNA16TritonMoE = sglangs
                with build() as other:
                    answer: Any = compare(other, found, load_file(request["expected"]))
            else:
                version = request.get("version")
                link = Link(**request["link"])
                action: Action = "connect"
                if version is not None:
                    action = "swap" if link.staged else "receive"
                command = Command(link, action, version, verify=version is not None)
                answer = asdict(receiver.handle(command, rank, load_weights, tensors))
            print(json.dumps(answer), file=answers, flush=True)


def compare(model: Any, found: dict[str, Tensor], weights: dict[str, Tensor]) -> dict[str, Any]:
    """How many parameters are quantized, and which differ in a bit from what SGLang loads."""
    spoil(list_loaded_parameters(model))
    model.load_weights(iter(weights.items()))
    for module in model.modules():
        if getattr(module, "scheme", None) is not None:
            module.quant_method.process_weights_after_loading(module)
    wanted = {
        name: tensor
        for name, tensor in list_loaded_parameters(model).items()
        if not name.endswith(OF_SGLANG_ALONE)
    }
    assert not any((_bytes(tensor) == 0xFF).all() for tensor in wanted.values())
    assert wanted.keys() == found.keys()
    differ = [name for name in wanted if not torch.equal(_bytes(wanted[name]), _bytes(found[name]))]
    return {
        "num_quantized": sum(t.dtype in (torch.float8_e4m3fn, torch.int32) for t in found.values()),
        "differ": differ,
    }


def spoil(tensors: Mapping[str, Tensor]) -> None:
    """Set every byte to 0xFF, which no weight has."""
    for tensor in tensors.values():
        _bytes(tensor).fill_(0xFF)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
