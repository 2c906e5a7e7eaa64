"""Has verl 0.5.0 run its workers on a CPU, in float32; Ray calls `run_on_cpu` in each process.

verl is left as it is otherwise. What is replaced:

- collectives and memory figures of CUDA, by gloo and zeros;
- Flash Attention, by PyTorch's attention, and bfloat16 by float32, as the other systems have it;
- in its rollout by transformers, a second repetition of the prompts, which the trainer has
  repeated.
"""

# pyright: reportMissingImports=false

import contextlib
import copy
from typing import Any

OF_CUDA = {
    "max_memory_allocated": 0,
    "max_memory_reserved": 0,
    "memory_allocated": 0,
    "memory_reserved": 0,
    "mem_get_info": (0, 0),
    "empty_cache": None,
    "get_device_name": "cpu",
}
"""Functions of torch.cuda that verl expects of torch.cpu, and what they answer."""


def run_on_cpu() -> None:
    import torch
    import transformers
    from torch import distributed

    for name, answer in OF_CUDA.items():
        setattr(torch.cpu, name, lambda answer=answer: answer)
    join = distributed.init_process_group
    distributed.init_process_group = lambda backend=None, **options: join("gloo", **options)
    torch.autocast = lambda *args, **options: contextlib.nullcontext()

    import verl.utils.device

    verl.utils.device.get_nccl_backend = lambda: "gloo"
    read = transformers.AutoConfig.from_pretrained

    def read_config(*args: Any, **options: Any) -> Any:
        if "attn_implementation" in options:
            options["attn_implementation"] = "sdpa"
        return read(*args, **options)

    transformers.AutoConfig.from_pretrained = read_config
    _take_each_prompt_once()


def _take_each_prompt_once() -> None:
    import omegaconf
    from verl.workers.rollout.hf_rollout import HFRollout

    make = HFRollout.__init__

    def make_for_one(self: Any, module: Any, config: Any) -> None:
        config = copy.deepcopy(config)
        with omegaconf.open_dict(config):
            config.n = 1
        make(self, module, config)

    HFRollout.__init__ = make_for_one
