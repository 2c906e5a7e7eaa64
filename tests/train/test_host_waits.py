"""A training step reads nothing back from the device for each of its micro-batches.

There is no GPU here. Three kinds of tensors count as if they lay on one: the model's parameters,
what `on_device` returns, and what is computed from either.
"""

import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mcore_rl.algo.policy_loss import make_policy_loss
from mcore_rl.config import AlgorithmConfig, ModelConfig, ParallelConfig
from mcore_rl.device import on_device
from mcore_rl.train import packing, routing
from mcore_rl.train.actor import Actor, TokenLoss
from mcore_rl.types import TrainBatch
from tests.support.distributed import run_ranks
from tests.support.tiny_training import (
    make_actor,
    make_batches,
    token_loss,
    with_engine_records,
    write_hf_model,
)

ROOT = Path(packing.__file__).parents[1]
OURS = (str(ROOT / "train"), str(ROOT / "algo"))
READERS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"}


class Waits(TorchDispatchMode):
    """Counts, by line of train/ and algo/, what would make the host wait for the device."""

    def __init__(self, model: Sequence[Tensor]) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()
        self._tensors = list(model)
        self._storages = {tensor.untyped_storage()._cdata for tensor in model}

    def place(self, value: Tensor) -> Tensor:
        """Stand in for `on_device`."""
        copy = on_device(value).clone()
        self._add(copy)
        return copy

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **kwargs or {})
        if any(map(self._is_placed, tree_leaves((args, kwargs)))):
            name = func._schema.name.removeprefix("aten::")
            if name in READERS or (name == "index" and _is_by_mask(args[1])):
                self._note(name)
            for value in tree_leaves(out):
                if isinstance(value, Tensor):
                    self._add(value)
        return out

    def _add(self, tensor: Tensor) -> None:
        self._tensors.append(tensor)  # its storage's address is not used again
        self._storages.add(tensor.untyped_storage()._cdata)

    def _is_placed(self, value: object) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage()._cdata in self._storages

    def _note(self, name: str) -> None:
        outside_torch = (
            f for f in reversed(traceback.extract_stack()) if "/torch/" not in f.filename
        )
        frame = next(f for f in outside_torch if f.filename != __file__)
        if frame.filename.startswith(OURS):
            self.lines[f"{Path(frame.filename).name}:{frame.lineno} {name}"] += 1


def _is_by_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype == torch.bool for index in indices)


def count_waits(actor: Actor, batches: list[TrainBatch], loss: TokenLoss) -> Counter[str]:
    model = [p for chunk in actor.chunks for p in chunk.parameters()]
    waits = Waits([*model, *(p.main_grad for p in model)])
    with pytest.MonkeyPatch.context() as patch, waits:
        for module in (packing, routing):
            patch.setattr(module, "on_device", waits.place)
        num_tokens = sum(sum(batch.lens_N) for batch in batches)
        actor.train_step(batches, loss, temperature=0.8, num_tokens=num_tokens)
    return waits.lines


def count_by_number(
    rank: int, world_size: int, port: int, hf_dir: Path, algorithm: AlgorithmConfig | None
) -> list[Counter[str]]:
    """Count the waits of a step with one micro-batch and of one with three."""
    loss = token_loss if algorithm is None else make_policy_loss(algorithm)
    batches, _ = with_engine_records(make_batches(), hf_dir)
    actor = make_actor(rank, world_size, port, ModelConfig(path=str(hf_dir)), ParallelConfig())
    return [count_waits(actor, batches[:number], loss) for number in (1, 3)]


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(None, id="sums over sequences"),
        pytest.param(AlgorithmConfig(), id="GRPO", marks=pytest.mark.slow),
    ],
)
def test_micro_batches_are_computed_without_waiting(
    tmp_path: Path, algorithm: AlgorithmConfig | None
) -> None:
    write_hf_model(tmp_path)
    [[one, three]] = run_ranks(count_by_number, 1, tmp_path, algorithm)
    assert one.total() > 0, "the step's own sums are read at its end"
    assert three == one
