"""Options of upstream that need a GPU are known, left out or refused."""

import ast
import inspect
import sys
from pathlib import Path

import pytest
from megatron.core.transformer.moe import fused_a2a

from mcore_rl.config.upstream.fields import SERVER, TRANSFORMER, read_fields
from mcore_rl.device import deep_ep, upstream
from mcore_rl.device.upstream import (
    megatron_needs_gpu,
    refuse_unavailable,
    server_needs_gpu,
)

MEGATRONS_IMPORT = ast.unparse(
    next(n for n in ast.parse(inspect.getsource(fused_a2a)).body if isinstance(n, ast.Try))
)
"""The lines by which megatron-core looks for DeepEP."""


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


def test_sinks_are_cut_over_heads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_unavailable({}, cp_of_sinks=2)  # without CUDA, torch modules compute it
    monkeypatch.setattr(upstream, "has_cuda", lambda: True)
    refuse_unavailable({"cp_comm_type": "a2a"}, cp_of_sinks=2)
    with pytest.raises(ValueError, match=r"parallel\.cp=2 .*sinks.*cp_comm_type=a2a alone"):
        refuse_unavailable({"cp_comm_type": "p2p"}, cp_of_sinks=2)


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process find DeepEP anew, and as before afterwards."""
    monkeypatch.setattr(deep_ep, "_faults", {})
    for name in ("deep_ep", "deep_ep.utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)


def write_deep_ep(folder: Path, code: str) -> None:
    """Write a package of SGLang's shape: EventOverlap is one level above where others have it."""
    package = folder / "deep_ep"
    (package / "utils").mkdir(parents=True)
    (package / "utils" / "__init__.py").write_text("class EventHandle: pass\n")
    (package / "__init__.py").write_text(code)


def test_megatron_finds_the_deepep_of_sglang(
    forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_deep_ep(tmp_path, "class EventOverlap: pass\nclass Buffer: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    deep_ep.give_megatron_deep_ep()
    names: dict[str, object] = {}
    exec(MEGATRONS_IMPORT, names)
    assert names["HAVE_DEEP_EP"] and not deep_ep.find_deep_ep_fault()


def test_a_deepep_that_cannot_be_imported_is_told_where_it_is_wanted(
    forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_deep_ep(tmp_path, "assert False, 'Duplicate NCCL runtime found: a and b'\n")
    monkeypatch.syspath_prepend(tmp_path)
    deep_ep.give_megatron_deep_ep()
    names: dict[str, object] = {}
    exec(MEGATRONS_IMPORT, names)
    assert not names["HAVE_DEEP_EP"]
    monkeypatch.setattr(upstream, "has_cuda", lambda: True)
    refuse_unavailable({"moe_token_dispatcher_type": "alltoall"})
    with pytest.raises(ValueError, match=r"type=flex: .*cannot be imported here: Duplicate NCCL"):
        refuse_unavailable({"moe_token_dispatcher_type": "flex"})
