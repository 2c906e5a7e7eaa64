"""Options of upstream that need a GPU are known, left out or refused."""

import pytest

from mcore_rl.config.upstream.fields import SERVER, TRANSFORMER, read_fields
from mcore_rl.device import upstream
from mcore_rl.device.upstream import megatron_needs_gpu, refuse_unavailable, server_needs_gpu


def test_the_names_are_upstreams() -> None:
    assert upstream._MEGATRON | upstream._MEGATRON_VALUES.keys() <= read_fields(TRANSFORMER).keys()
    assert read_fields(SERVER).keys() >= upstream._SERVER
    for prefix in upstream._SERVER_PREFIXES:
        assert any(name.startswith(prefix) for name in read_fields(SERVER)), prefix


def test_which_options_need_a_gpu() -> None:
    assert megatron_needs_gpu("fp8_recipe", "blockwise")
    assert megatron_needs_gpu("moe_token_dispatcher_type", "flex")
    assert not megatron_needs_gpu("moe_token_dispatcher_type", "alltoall")
    assert not megatron_needs_gpu("deterministic_mode", True)
    assert server_needs_gpu("cuda_graph_bs_decode", [1]) and server_needs_gpu("kv_cache_dtype", "a")
    assert not server_needs_gpu("enable_dp_lm_head", True)


@pytest.mark.skipif(upstream.has_cuda(), reason="there is a GPU")
def test_they_are_refused_without_one() -> None:
    refuse_unavailable({"moe_permute_fusion": False, "deterministic_mode": True})
    with pytest.raises(ValueError, match=r"train.megatron.fp8=hybrid: there is no GPU here"):
        refuse_unavailable({"deterministic_mode": True, "fp8": "hybrid"})


def test_deepep_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "has_cuda", lambda: True)
    with pytest.raises(ValueError, match=r"type=flex: its kernels come from DeepEP.*=alltoall"):
        refuse_unavailable({"moe_token_dispatcher_type": "flex"})
