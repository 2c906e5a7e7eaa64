"""Engines that serve factors as an adapter get each version whole, and keep the weights below."""

import asyncio

import pytest
import torch

from mcore_rl.tools.doctor.toy_engine import TINY, Cut, Fault, column_cut, expert_cut, row_cut
from mcore_rl.weight_sync.controller.sync import SyncError
from mcore_rl.weights.lora.facts import spell_key
from mcore_rl.weights.lora.served import SERVED
from tests.support.adapted_trainers import RANK, SCALE, make_factors
from tests.support.thread_engines import ThreadEngine
from tests.weight_sync.adapter.test_factor_sync import FAULTS, held_by, open_stage, sync

NAME = "policy"


def serves(engine: ThreadEngine, version: int, dtype: torch.dtype = torch.float32) -> bool:
    """Whether each rank was last told to serve exactly the factors of `version`."""
    wanted = {spell_key(key): factor for key, factor in make_factors(version, TINY, dtype).items()}
    for installed in engine.installed:
        name, found, config, factors = installed[-1]
        assert (name, found, config["r"]) == (NAME, version, RANK)
        assert config["lora_alpha"] / config["r"] == pytest.approx(SCALE)
        assert {*config["target_modules"]} <= {*SERVED}
        if not all(torch.equal(factors[key], factor) for key, factor in wanted.items()):
            return False
        # k_proj is not adapted, and SGLang keeps its factors with those of q_proj and v_proj.
        others = [tensor for key, tensor in factors.items() if key not in wanted]
        assert len(others) == 2 and not any(tensor.any() for tensor in others)
    return True


@pytest.mark.parametrize(
    ("cut", "engines", "dtype"),
    [
        pytest.param(expert_cut, (2, 1), torch.float32, id="experts"),
        pytest.param(row_cut, (3,), torch.bfloat16, id="rows"),
        pytest.param(column_cut, (2,), torch.float32, id="columns"),
    ],
)
def test_every_rank_gets_each_version_whole(
    cut: Cut, engines: tuple[int, ...], dtype: torch.dtype
) -> None:
    options = {"cut": cut, "dtype": dtype, "engine_dtype": dtype, "verify_every": 1, "name": NAME}
    with open_stage(*engines, **options) as (stage, controller):
        num_bytes = []
        for version in range(1, 4):
            report = sync(stage, controller, version)
            assert not report.failed and report.verified == set(stage.urls)
            num_bytes.append(sum(engine.num_bytes for engine in report.engines))
            for engine in stage.engines:
                assert engine.holds(0), "the weights below the factors"
                assert serves(engine, version, dtype)
                assert engine.version == str(version) and not engine.is_paused
        assert num_bytes[1] == num_bytes[2] < num_bytes[0]


def test_an_engine_that_is_linked_again_gets_the_weights_below_and_the_factors() -> None:
    with open_stage(2, 1, name=NAME) as (stage, controller):
        sync(stage, controller, 1)
        first = stage.engines[0]
        for model in first.models:
            for parameter in model.parameters():
                parameter.data.fill_(float("nan"))
        asyncio.run(controller.connect([first.url]))
        sync(stage, controller, 2)
        assert all(serves(engine, 2) and engine.holds(0) for engine in stage.engines)


REFUSED = ("dropped", "half", "transposed", "doubled", "wrong base", "wrong alpha", "wrong rank")


@pytest.mark.parametrize("fault", REFUSED)
def test_a_faulty_adapter_is_refused_before_a_request_is_answered(fault: str) -> None:
    plant, message = FAULTS[fault]
    if fault == "dropped":
        message = "has factors of 13 matrices, and the recipe adapts 14"
    with open_stage(2, name=NAME) as (stage, controller):
        stage.trainers.load(1)
        plant(held_by(stage))
        with pytest.raises(SyncError, match=message):
            asyncio.run(controller.sync(1))
        assert not controller.linked
        assert stage.engines[0].installed == [[], []]
        assert "/update_weight_version" not in stage.engines[0].calls


def test_a_changed_byte_of_factors_is_refused_and_the_engine_serves_on() -> None:
    with open_stage(1, name=NAME) as (stage, controller):
        stage.faults["", f"{stage.urls[0]} (factors)"] = Fault(rank=0, message=1, kind="corrupt")
        sync(stage, controller, 1)
        with pytest.raises(SyncError, match="no engine took version 2"):
            sync(stage, controller, 2)
        engine = stage.engines[0]
        assert serves(engine, 1) and len(engine.installed[0]) == 1 and not engine.is_paused


def test_weights_that_changed_below_an_adapter_are_noticed() -> None:
    with open_stage(1, verify_every=1, name=NAME) as (stage, controller):
        sync(stage, controller, 1)
        stage.engines[0].models[0].norm.data.add_(1)
        with pytest.raises(SyncError, match=r"of version 1 lies in .* with checksum"):
            sync(stage, controller, 2)
