"""Trainer ranks of a toy model with low-rank factors, in threads, and the engine that it should be.

Each rank holds merged weights, the weights below the factors, and whole factors, as in train/lora.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from mcore_rl.tools.doctor.toy_engine import Cut, FusedEngine, ToySizes, expert_cut, make_tensors
from mcore_rl.weight_sync.sender import WeightSender
from mcore_rl.weights.box import Shard
from mcore_rl.weights.lora.places import (
    AdapterStamp,
    Content,
    Held,
    make_stamp_shard,
    make_whole_factors,
)
from mcore_rl.weights.lora.product import add_product
from tests.support.thread_engines import FaultsByLink, ThreadEngine, ThreadTrainers, make_faulty

RANK = 3
SCALE = 7 / 3
BASE = "ab" * 32
"""Checksum of the weights below the factors."""


def list_adapted(sizes: ToySizes) -> dict[str, tuple[int, ...]]:
    """The matrices that are adapted, with their shapes: all but the embedding and k_proj."""
    frozen = ("embed.weight", "norm.weight", "attn.k_proj.weight")
    return {name: shape for name, shape in sizes.shapes.items() if name not in frozen}


def make_stamp(sizes: ToySizes, rank: int = RANK) -> AdapterStamp:
    return AdapterStamp(rank, SCALE, len(list_adapted(sizes)), BASE)


def make_factors(
    seed: int, sizes: ToySizes, dtype: torch.dtype, rank: int = RANK
) -> dict[str, Tensor]:
    """Random factors of a version, by "<HF tensor>.A" and "<HF tensor>.B"."""
    generator = torch.Generator().manual_seed(1000 + seed)
    factors = {}
    for name, (num_rows, num_columns) in list_adapted(sizes).items():
        for key, shape in (("A", (rank, num_columns)), ("B", (num_rows, rank))):
            factors[f"{name}.{key}"] = torch.randn(shape, generator=generator).to(dtype)
    return factors


def merge(seed: int, sizes: ToySizes, dtype: torch.dtype) -> dict[str, Tensor]:
    """The whole weights of a version."""
    factors = make_factors(seed, sizes, dtype)
    merged = {name: tensor.to(dtype) for name, tensor in make_tensors(0, sizes).items()}
    for name in list_adapted(sizes):
        add_product(merged[name], factors[f"{name}.A"], factors[f"{name}.B"], SCALE)
    return merged


class AdaptedTrainers(ThreadTrainers):
    """TrainerRanks; faults for tests are planted in `held`.

    adapters   ranks of the factors of several adapters, by name
    """

    def __init__(
        self,
        num_ranks: int,
        faults: FaultsByLink,
        sizes: ToySizes,
        cut: Cut = expert_cut,
        dtype: torch.dtype = torch.float32,
        adapters: Mapping[str, int] | None = None,
    ) -> None:
        self.world_size = num_ranks
        self._ranks = adapters or {}
        self._sizes = sizes
        self._dtype = dtype
        self.calls = []
        self.held: list[dict[Content, Held]] = []
        self.several: list[dict[str, Held]] = []
        self._senders = []
        names = str(dtype).removeprefix("torch.")
        for rank in range(num_ranks):
            shards, tensors = cut(make_tensors(0, sizes), rank, num_ranks, names)
            adapter = self._make_adapter(shards, tensors, names)
            self.held.append({"weights": (shards, tensors), **adapter})
            several = {
                name: self._make_adapter(shards, tensors, names, own)["factors"]
                for name, own in self._ranks.items()
            }
            self.several.append(several)
            unadapted = partial(self._show_base, rank)
            how = make_faulty(faults), adapter, unadapted, several
            self._senders.append(WeightSender(shards, tensors, rank, *how))

    def _make_adapter(
        self, shards: Sequence[Shard], tensors: dict[str, Tensor], dtype: str, rank: int = RANK
    ) -> dict[Content, Held]:
        adapted = list_adapted(self._sizes)
        own = [shard for shard in shards if shard.box.name in adapted]
        base = {shard.tensor: tensors[shard.tensor].clone() for shard in own}
        factors: dict[str, Tensor] = {"stamp": torch.tensor(make_stamp(self._sizes, rank).encode())}
        places = [make_stamp_shard("stamp")]
        for shard in own:
            name = shard.box.name
            for letter, shape in (("A", (rank, adapted[name][1])), ("B", (adapted[name][0], rank))):
                factors[f"{name}.{letter}"] = torch.zeros(shape, dtype=self._dtype)
            both = f"{name}.A", f"{name}.B"
            places += make_whole_factors(name, adapted[name], rank, both, dtype)
        return {"base": (own, base), "factors": (places, factors)}

    @contextmanager
    def _show_base(self, rank: int) -> Iterator[None]:
        weights, (places, bases) = self.held[rank]["weights"][1], self.held[rank]["base"]
        merged = {name: tensor.clone() for name, tensor in weights.items()}
        for shard in places:
            shard.view(weights).copy_(shard.view(bases))
        yield
        for name, tensor in merged.items():
            weights[name].copy_(tensor)

    def load_adapter(self, name: str, seed: int) -> None:
        """Give the trainer ranks other factors of one of several adapters."""
        factors = make_factors(seed, self._sizes, self._dtype, self._ranks[name])
        for several in self.several:
            for key, factor in several[name][1].items():
                if key != "stamp":
                    factor.copy_(factors[key])

    def load(self, version: int) -> None:
        """Give the trainer ranks the factors of `version`, and merge them."""
        factors = make_factors(version, self._sizes, self._dtype)
        for held in self.held:
            places, bases = held["base"]
            for key, factor in held["factors"][1].items():
                if key != "stamp":
                    factor.copy_(factors[key])
            for shard in places:
                weight = shard.view(held["weights"][1])
                weight.copy_(shard.view(bases))
                rows, columns = map(slice, shard.box.start, shard.box.stop)
                name = shard.box.name
                a, b = (held["factors"][1][f"{name}.{letter}"] for letter in "AB")
                add_product(weight, a[:, columns], b[rows], SCALE)


def holds(engine: ThreadEngine, version: int, dtype: torch.dtype = torch.float32) -> bool:
    """Whether each parameter is, bit for bit, what the loader makes of the whole weights."""
    for rank, model in enumerate(engine.models):
        expected = FusedEngine(rank, len(engine.models), model.norm.dtype, model.sizes)
        expected.load_weights(merge(version, model.sizes, dtype).items())
        for name, wanted in expected.named_parameters():
            if not torch.equal(model.get_parameter(name), wanted):
                return False
    return True
