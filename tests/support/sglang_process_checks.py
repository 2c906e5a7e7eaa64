"""Checks of the patches of SGLang's processes and collectives; see sglang_on_cpu_checks.py."""

# pyright: reportMissingImports=false

import contextlib
import inspect
import sys
import tempfile
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from tests.support.upstream import assert_defect, fails_without


def check_sleep_while_paused():
    from sglang.srt.managers.scheduler import Scheduler
    from sglang_on_cpu.processes import sleep_while_paused

    before = Scheduler._record_scheduler_state_for_paused_engine
    for loop in (before, Scheduler.event_loop_normal, Scheduler.event_loop_overlap):
        assert_defect("sleep_while_paused", "sleep" not in inspect.getsource(loop))
    sleep_while_paused()
    assert Scheduler._record_scheduler_state_for_paused_engine is not before


def check_compute_prompts_once():
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler

    from mcore_rl.rollout.scheduler_setup import MOST_HOLDS, compute_prompts_once

    def admit(adder, req, has_chunked_req, truncation_align_size):
        adder.can_run_list.append(req)
        return AddReqResult.CONTINUE

    def request(prompt, **changes):
        longest = {"_compute_max_prefix_len": lambda input_len: input_len - 1}
        own = {"output_ids": [], "extra_key": None, "cache_salt": None, **longest}
        req = {"origin_input_ids": prompt, "num_matched_prefix_tokens": 0, **own, **changes}
        return SimpleNamespace(finished=lambda: False, **req)

    def admitted(*requests, disable=False):
        adder_class = Scheduler.get_prefill_adder_class(None)
        adder = adder_class.__new__(adder_class)
        adder.can_run_list, adder.page_size = [], 1
        adder.tree_cache = SimpleNamespace(disable=disable, supports_mamba=lambda: False)
        for req in requests:
            assert adder.add_one_req(req, False, None) is AddReqResult.CONTINUE
        return [req in adder.can_run_list for req in requests]

    prompt, other = list(range(20)), list(range(1, 21))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PrefillAdder, "add_one_req", admit)
        assert admitted(request(prompt), request(prompt)) == [True, True]
        compute_prompts_once()
        waiting = request(prompt)
        assert admitted(request(prompt), waiting, request(other)) == [True, False, True]
        for _ in range(MOST_HOLDS - 1):
            assert admitted(waiting) == [False]
        assert admitted(waiting) == [True]  # whatever became of the first
        assert admitted(request(prompt, num_matched_prefix_tokens=19)) == [True]
        assert admitted(request(prompt, num_matched_prefix_tokens=12)) == [True]
        assert admitted(request(prompt, num_matched_prefix_tokens=11)) == [False]
        assert admitted(request(prompt, extra_key="another")) == [True]
        assert admitted(request(prompt), disable=True) == [True]
        scored = request(prompt, _compute_max_prefix_len=lambda input_len: 0)
        assert admitted(scored) == [True]
        scored.finished = lambda: True
        assert admitted(request(prompt)) == [True]


def check_wait_for_requests():
    import zmq
    from sglang.srt.managers.data_parallel_controller import DataParallelController
    from sglang_on_cpu import data_parallel

    context, turns = zmq.Context(), []
    inbox, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.bind("inproc://requests")
    sender.connect("inproc://requests")

    class Stopped(Exception):
        pass

    def deal_out(request):
        raise Stopped

    def loop():
        fed = SimpleNamespace(feed=lambda: turns.append(None))
        this = SimpleNamespace(
            soft_watchdog=fed, recv_from_tokenizer=inbox, _request_dispatcher=deal_out
        )
        with contextlib.suppress(Stopped):
            DataParallelController.event_loop(this)

    def count_turns(most, seconds):
        """Return how often the loop looks for a request in this time, or more than `most`."""
        turns.clear()
        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        until_s = time.monotonic() + seconds
        while len(turns) <= most and time.monotonic() < until_s:
            time.sleep(0.01)
        num_turns = len(turns)
        sender.send_pyobj("stop")
        thread.join(30)
        assert not thread.is_alive(), "a request does not end the wait"
        return num_turns

    assert_defect("wait_for_requests", count_turns(100, seconds=10) > 100)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(data_parallel, "LONGEST_WAIT_MS", 60_000)
        data_parallel.wait_for_requests()
        assert count_turns(1, seconds=0.3) <= 1


def check_fork_workers():
    from sglang.srt.entrypoints import engine
    from sglang_on_cpu.processes import fork_workers

    before = engine._set_envs_and_config
    spawns = 'mp.set_start_method("spawn", force=True)' in inspect.getsource(before)
    assert_defect("fork_workers", spawns)
    fork_workers()
    assert engine._set_envs_and_config is not before


def check_keep_load_snapshots_in_temp_dir():
    from sglang.srt.managers import load_snapshot
    from sglang_on_cpu.processes import keep_load_snapshots_in_temp_dir

    in_shared_memory = load_snapshot.shm_path_for("x").startswith("/dev/shm/")
    assert_defect("keep_load_snapshots_in_temp_dir", in_shared_memory)
    keep_load_snapshots_in_temp_dir()
    assert load_snapshot.shm_path_for("x").startswith(tempfile.gettempdir() + "/sglang_loads_")


def check_leave_megatron_out():
    import sglang.srt.debug_utils.dumper as dumper
    from sglang_on_cpu.processes import leave_megatron_out

    assert_defect("leave_megatron_out", "from megatron.core import" in inspect.getsource(dumper))
    leave_megatron_out()
    with pytest.raises(ImportError):
        __import__("megatron.core")


def check_import_models_when_asked():
    from sglang.srt.models import registry
    from sglang.srt.models.registry import ModelRegistry
    from sglang_on_cpu.models import import_models_when_asked

    imports_all = 'import_model_classes("sglang.srt.models")' in inspect.getsource(registry)
    assert_defect("import_models_when_asked", imports_all)
    assert set(ModelRegistry.models) == {"Qwen3MoeForCausalLM"}, "only served_models is registered"
    before = set(sys.modules)
    import_models_when_asked()
    assert ModelRegistry.is_arch_supported("Glm4MoeForCausalLM")
    for name in ("Glm4MoeForCausalLM", "Qwen3MoeForCausalLM"):
        assert ModelRegistry.resolve_model_cls([name])[0].__name__ == name
    imported = [name for name in set(sys.modules) - before if name.startswith("sglang.srt.models.")]
    assert "sglang.srt.models.glm4_moe" in imported and len(imported) < 20, imported
    assert ModelRegistry.is_arch_supported("GemmaForCausalLM"), (
        "the others are imported when asked for"
    )


def check_import_few_image_processors():
    from sglang.srt.managers import multimodal_processor, tokenizer_manager
    from sglang_on_cpu.models import import_few_image_processors

    whole = multimodal_processor.import_processors
    imports_all = "pkgutil.iter_modules" in inspect.getsource(whole)
    assert_defect("import_few_image_processors", imports_all)
    import_few_image_processors()
    tokenizer_manager.import_processors("sglang.srt.multimodal.processors")
    served = {model.__name__ for model in multimodal_processor.PROCESSOR_MAPPING}
    assert "Qwen2_5_VLForConditionalGeneration" in served
    assert "sglang.srt.multimodal.processors.minicpm" not in sys.modules
    ours = "mcore_rl.rollout.vision_models"
    tokenizer_manager.import_processors(ours, overwrite=True)
    of_ours = {
        model.__name__
        for model, processor in multimodal_processor.PROCESSOR_MAPPING.items()
        if processor.__module__.startswith(ours)
    }
    assert of_ours == {"KimiVLForConditionalGeneration", "KimiK25ForConditionalGeneration"}


def check_pad_batches():
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend
    from sglang_on_cpu.data_parallel import pad_batches

    backend = object.__new__(Backend)
    assert_defect("pad_batches", not hasattr(backend, "get_cpu_graph_seq_len_fill_value"))
    pad_batches()
    assert backend.get_cpu_graph_seq_len_fill_value() == 1


def check_reduce_without_nccl():
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang_on_cpu.data_parallel import reduce_without_nccl

    group = object.__new__(GroupCoordinator)
    group.world_size, group.rank_in_group, group.pynccl_comm = 2, 1, None
    group.all_reduce = lambda value: 3 * value
    parts = torch.arange(8.0).view(4, 2)
    with fails_without("reduce_without_nccl", AttributeError, AssertionError):
        group.reduce_scatterv(parts)
    reduce_without_nccl()
    assert torch.equal(group.reduce_scatterv(parts), 3 * parts[2:])
    assert torch.equal(group.reduce_scatterv(parts, sizes=[3, 1]), 3 * parts[3:])
