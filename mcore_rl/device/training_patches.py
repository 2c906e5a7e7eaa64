"""Patches of megatron-core in training ranks: Adam in bounded memory, and writes of checkpoints.

An Adam with moments in less than float32 computes in float32: Transformer Engine's makes copies of
all moments of a group at once, 8 bytes per parameter, and only then rounds them (2.11,
fused_adam.py). That is more than moments in bfloat16 save.
"""

import queue
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

MOST_ELEMENTS = 64 * 2**20
"""How much of the parameters is updated at once: copies of their moments take half a GiB."""


def keep_write_results_in_process() -> None:
    """Collect the results of checkpoint writes in a queue of this process.

    megatron-core 0.19.2 starts a manager process at the first save to carry results from forked
    writers. The manager takes seconds to start and outlives a killed rank. Our saves are written by
    a thread of this process, so a plain queue is enough.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def step_in_parts(adam: type[Any], most_elements: int = MOST_ELEMENTS) -> type[Any]:
    """Return a subclass of an Adam, Transformer Engine's or our own, whose step updates
    `most_elements` elements at a time, or a single parameter. The values are the same.
    """

    class AdamInParts(adam):
        def initialize_state(self, param: Tensor, store_param_remainders: bool = False) -> None:
            # megatron-core 0.19.2 leaves the argument out, and Transformer Engine 2.11 wants it.
            super().initialize_state(param, store_param_remainders)

        def state_dict(self) -> dict[str, Any]:
            # Transformer Engine's has copies in float32, of which megatron-core uses the groups.
            return torch.optim.Optimizer.state_dict(self)

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            # megatron-core hands back the state it got, for new memory, and then fills it.
            if not _is_state_of(state_dict["state"], self):
                super().load_state_dict(state_dict)
                return
            state = self.state
            groups_alone = {**state_dict, "state": {}}
            torch.optim.Optimizer.load_state_dict(self, groups_alone)
            self.state = state

        def step(self, *args: Any, **kwargs: Any) -> Any:
            if self.exp_avg_dtype == torch.float32 == self.exp_avg_sq_dtype:
                return super().step(*args, **kwargs)
            groups = self.param_groups
            try:
                for group in groups:
                    self._step_group(group, *args, **kwargs)
            finally:
                self.param_groups = groups
            return None

        def _step_group(self, group: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            params, step = group["params"], group.get("step", 0)
            self.param_groups = [group]
            try:
                for part in _parts(params, most_elements):
                    group["step"] = step  # each call counts one
                    group["params"] = part
                    super().step(*args, **kwargs)
            finally:
                group["params"] = params

    AdamInParts.__name__ = AdamInParts.__qualname__ = adam.__name__
    return AdamInParts


def use_adam_in_parts() -> None:
    """Give the distributed optimizer Transformer Engine's Adam with bounded steps."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam = distrib_optimizer.Adam = step_in_parts(optimizer.Adam)


def _is_state_of(state: Mapping[int, Mapping[str, Any]], optimizer: Any) -> bool:
    """Return whether an optimizer's `state`, by number of the parameter, is all that it has."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    own = {
        number: optimizer.state[param]
        for number, param in enumerate(params)
        if param in optimizer.state
    }
    return own.keys() == state.keys() and all(
        own[number].keys() == values.keys()
        and all(own[number][name] is value for name, value in values.items())
        for number, values in state.items()
    )


def _parts(params: Sequence[Tensor], most_elements: int) -> Iterator[list[Tensor]]:
    part: list[Tensor] = []
    num_elements = 0
    for param in params:
        if part and num_elements + param.numel() > most_elements:
            yield part
            part, num_elements = [], 0
        part.append(param)
        num_elements += param.numel()
    if part:
        yield part
