"""One rank of an SGLang engine, most often with FP8 weights, linked as in a run, but not serving.

SGLang 0.5.23 serves FP8 on the CPU only with AMX. Model, parameters and loaders are its own.
Arguments: JSON {"hf_dir", "sizes", "rank"}. Then each line of JSON on stdin is answered by one on
stdout:

{"link"}                         connect
{"link", "version"}              receive; over a staged link, swap in
{"expected": safetensors file}   name parameters that differ from what SGLang loads from the file
"""

# pyright: reportMissingImports=false

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from mcore_rl.device.sglang_setup import use_cpu
from mcore_rl.weight_sync.draft_model import list_loaded_parameters
from mcore_rl.weight_sync.receiver import (
    WeightReceiver,
    keep_on_calling_thread,
)
from mcore_rl.weight_sync.wire import Action, Command, Link
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from tests.support.sglang_layout_checks import engine_model


def main(hf_dir: str, sizes: dict[str, Any], rank: int) -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # SGLang prints
    use_cpu([])
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.bfloat16)
    with engine_model(hf_dir, "bfloat16", SGLangSizes(**sizes), rank) as model:
        receiver = WeightReceiver()
        tensors = list_loaded_parameters(model)
        spoil(tensors)
        load_weights = keep_on_calling_thread(model.load_weights)
        print("{}", file=answers, flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            if "expected" in request:
                found = {name: tensor.detach().clone() for name, tensor in tensors.items()}
                answer: Any = compare(model, found, load_file(request["expected"]))
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
    """How many parameters are FP8, and which differ in a bit from what SGLang loads."""
    wanted = list_loaded_parameters(model)
    spoil(wanted)
    model.load_weights(iter(weights.items()))
    assert not any((_bytes(tensor) == 0xFF).all() for tensor in wanted.values())
    differ = [name for name in wanted if not torch.equal(_bytes(wanted[name]), _bytes(found[name]))]
    return {
        "num_fp8": sum(t.dtype == torch.float8_e4m3fn for t in wanted.values()),
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
