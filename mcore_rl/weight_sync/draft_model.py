"""A served model and its draft model as one, whose weights are synced together.

    HF name                        loaded by          parameters
    model.layers.0 to 60, others   the served model   as SGLang names them
    model.layers.61, or mtp.       its draft model    "draft." before SGLang's names

The draft model has the embedding and the output layer of the served model, the same parameters.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mcore_rl.weights.models.mtp import APART

PREFIX = "draft."
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class ServedModel:
    """The modules of one engine rank."""

    model: nn.Module
    draft: nn.Module | None = None

    @property
    def parts(self) -> list[nn.Module]:
        return [self.model] if self.draft is None else [self.model, self.draft]

    def list_parameters(self) -> dict[str, Tensor]:
        """Return the parameters of both that a checkpoint fills, each once."""
        own = list_loaded_parameters(self.model)
        if self.draft is None:
            return own
        shared = {id(parameter) for parameter in own.values()}
        drafts = {
            PREFIX + name: parameter
            for name, parameter in list_loaded_parameters(self.draft).items()
            if id(parameter) not in shared
        }
        return own | drafts

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Have each model load its own of the (HF name, tensor)."""
        load: Any = self.model.load_weights
        if self.draft is None:
            load(named_tensors)
            return
        config: Any = self.model.config
        num_layers: int = config.num_hidden_layers
        drafts: list[tuple[str, Tensor]] = []

        def pick_own() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in named_tensors:
                layer = _LAYER.match(name)
                is_behind = layer is not None and int(layer[1]) >= num_layers
                if is_behind or name.startswith(APART):
                    drafts.append((name, tensor))
                else:
                    yield name, tensor

        load(pick_own())
        load_drafts: Any = self.draft.load_weights
        load_drafts(drafts)


def list_loaded_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that a checkpoint fills.

    SGLang marks all others, such as the scales of its KV cache, with `_skip_weight_check`.
    """
    return {
        name: tensor
        for name, tensor in model.named_parameters()
        if not getattr(tensor, "_skip_weight_check", False)
    }
