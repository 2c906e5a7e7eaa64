"""Checks of the stand-ins and of each SGLang patch, run in a process that has the stand-ins on its path.

A check of a patch shows what SGLang does without it, so that it fails once SGLang needs it no more. Output:
one JSON object, name of the check -> traceback, empty where it passed.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

import contextlib
import inspect
import json
import sys
import tempfile
import traceback
from types import SimpleNamespace


def raises(kind, function, *args, match=""):
    try:
        function(*args)
    except kind as error:
        assert match in str(error), error
        return
    raise AssertionError(f"{function} did not raise {kind.__name__}")


def attention_inputs(dtype, seed):
    """A batch of 9 requests in a KV pool of 400 slots, 4 query heads on 2 KV heads."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    prefix = torch.tensor([0, 5, 0, 37, 1, 0, 12, 3, 2])
    extend = torch.tensor([7, 1, 33, 4, 1, 1, 20, 2, 9])
    slots = torch.randperm(400, generator=generator)
    req_to_token = torch.zeros(12, 64, dtype=torch.int32)
    requests = torch.randperm(12, generator=generator)[:9]
    taken = 0
    for request, num_tokens in zip(requests.tolist(), (prefix + extend).tolist(), strict=True):
        req_to_token[request, :num_tokens] = slots[taken : taken + num_tokens].int()
        taken += num_tokens
    caches = [torch.randn(400, 2, 16, generator=generator).to(dtype) for _ in range(2)]
    query = torch.randn(int(extend.sum()), 4, 16, generator=generator).to(dtype)
    return query, caches, req_to_token, requests, prefix, extend


def check_batch_attention():
    import torch
    from sglang.srt.layers.attention import torch_native_backend as module
    from sglang_on_cpu.attention import batch_attention

    backend_class = module.TorchNativeAttnBackend
    loop_extend, loop_decode = (
        backend_class._run_sdpa_forward_extend,
        backend_class._run_sdpa_forward_decode,
    )
    batch_attention()
    calls = []
    sdpa = module.scaled_dot_product_attention
    module.scaled_dot_product_attention = lambda *a, **k: calls.append(1) or sdpa(*a, **k)
    for dtype, tolerance, window in ((torch.float32, 1e-6, None), (torch.bfloat16, 2e-2, 3)):
        query, caches, req_to_token, requests, prefix, extend = attention_inputs(dtype, seed=1)
        options = {"scaling": 0.25, "enable_gqa": True, "sliding_window_size": window}
        where = (*caches, req_to_token, requests, prefix + extend)
        for causal_extend in (True, False):
            inputs = query if causal_extend else query[:9]
            output = torch.empty_like(inputs)
            if causal_extend:
                args = (inputs, output, *where, prefix, extend)
                functions = loop_extend, backend_class._run_sdpa_forward_extend
                options["causal"] = True
            else:
                args = (inputs, output, *where)
                functions = loop_decode, backend_class._run_sdpa_forward_decode
                options["causal"] = False
            backend = object.__new__(backend_class)
            calls.clear()
            expected = functions[0](backend, *args, **options).clone()
            assert len(calls) == 9, "SGLang no longer loops over requests"
            calls.clear()
            output.fill_(float("nan"))
            actual = functions[1](backend, *args, **options)
            assert not calls
            assert (actual.float() - expected.float()).abs().max() < tolerance


def check_sinks():
    """SGLang's torch_native backend takes none; here a sink is a further key whose value is 0."""
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend
    from sglang_on_cpu.attention import attend, batch_attention, make_groups

    assert "sinks" not in inspect.getsource(sys.modules[Backend.__module__])
    query, caches, req_to_token, requests, prefix, extend = attention_inputs(torch.float32, seed=2)
    lens, sinks = (prefix + extend).tolist(), torch.tensor([0.5, -1.0, 2.0, 0.0])
    output = torch.empty_like(query)
    for group in make_groups(extend.tolist(), lens, req_to_token, requests):
        attend(group, query, output, *caches, 0.25, sinks_h=sinks)
    last = int(extend[:4].sum()) - 1
    slots = req_to_token[requests[3], : lens[3]].long()
    for head in range(4):
        keys, values = (cache[slots, head // 2] for cache in caches)
        weights = (keys @ query[last, head] * 0.25).exp()
        expected = weights @ values / (weights.sum() + sinks[head].exp())
        assert torch.allclose(output[last, head], expected, atol=1e-6)
    seen = []
    Backend.forward_extend = lambda self, *args, **options: seen.append(self.sinks_h)
    batch_attention()
    backend = object.__new__(Backend)
    Backend.forward_extend(backend, sinks=sinks)
    Backend.forward_extend(backend)
    assert seen[0] is sinks and seen[1] is None


def check_admit_torch_native():
    from sglang.srt.arg_groups import model_hook
    from sglang_on_cpu.attention import admit_torch_native

    source = inspect.getsource(model_hook)
    branch = source.split('model_arch in ["GptOssForCausalLM"]')[1].split("supported_backends and")[
        0
    ]
    assert '"torch_native",' not in branch and "attention_backends_of(" in branch
    settings = SimpleNamespace(
        attention_backend="torch_native",
        prefill_attention_backend=None,
        decode_attention_backend=None,
    )
    assert model_hook.attention_backends_of(settings) == ("torch_native", "torch_native")
    admit_torch_native()
    assert model_hook.attention_backends_of(settings) == ("intel_amx", "intel_amx")


def check_batch_attention_ignores_other_requests():
    """Padding must not bring in other requests' keys, were they NaN."""
    import torch
    from sglang_on_cpu.attention import attend, make_groups

    query, caches, req_to_token, requests, prefix, extend = attention_inputs(torch.float32, seed=3)
    lens = (prefix + extend).tolist()
    victim = requests[3]
    for cache in caches:
        cache[req_to_token[victim, : lens[3]].long()] = float("nan")
    output = torch.zeros_like(query)
    for group in make_groups(extend.tolist(), lens, req_to_token, requests):
        attend(group, query, output, *caches, 0.25)
    rows = extend.cumsum(0)
    assert output[rows[2] : rows[3]].isnan().all()
    assert not output[: rows[2]].isnan().any() and not output[rows[3] :].isnan().any()


def check_run_local_experts():
    import torch
    from sglang.srt.layers.moe import fused_moe_native
    from sglang_on_cpu.experts import run_local_experts

    torch.manual_seed(0)
    original = fused_moe_native.moe_forward_native
    x, w13, w2 = torch.randn(10, 8), torch.randn(2, 12, 8), torch.randn(2, 8, 6)
    layer = SimpleNamespace(w13_weight=w13, w2_weight=w2, num_experts=2)
    config = SimpleNamespace(
        activation="silu", apply_router_weight_on_input=False, gemm1_alpha=None
    )
    weights, ids = torch.rand(10, 2), torch.randint(-1, 2, (10, 2))
    raises((RuntimeError, IndexError), original, layer, x, (weights, ids, None), config)
    run_local_experts()
    expected = torch.zeros(10, 8)
    for token in range(10):
        for choice in range(2):
            if (expert := int(ids[token, choice])) >= 0:
                gate, up = (w13[expert] @ x[token]).chunk(2)
                expert_out = w2[expert] @ (torch.nn.functional.silu(gate) * up)
                expected[token] += weights[token, choice] * expert_out
    actual = fused_moe_native.moe_forward_native(layer, x, (weights, ids, None), config)
    assert torch.allclose(actual, expected, atol=1e-5)


def check_gate_shared_expert():
    import torch
    from sglang.kernels.ops.elementwise.elementwise import (
        fused_gate_sigmoid_mul,
        fused_gate_sigmoid_mul_add,
    )
    from sglang_on_cpu.kernels import gate_shared_expert

    torch.manual_seed(0)
    hidden, weight, shared, routed = (
        torch.randn(5, 8),
        torch.randn(8),
        torch.randn(5, 8),
        torch.randn(5, 8),
    )
    raises(NotImplementedError, fused_gate_sigmoid_mul, hidden, weight, shared)
    gate_shared_expert()
    expected = torch.sigmoid(hidden @ weight)[:, None] * shared
    assert torch.allclose(fused_gate_sigmoid_mul(hidden, weight, shared), expected)
    total = routed.clone()
    fused_gate_sigmoid_mul_add(hidden, weight, shared, total)
    assert torch.allclose(total, routed + expected)


def check_normalise_projections():
    import torch
    from sglang.srt.models import minimax_m2
    from sglang_on_cpu.kernels import normalise_projections

    torch.manual_seed(0)
    q, k, q_weight, k_weight = torch.randn(5, 8), torch.randn(5, 4), torch.randn(8), torch.randn(4)
    raises(AssertionError, minimax_m2.rms_sumsq_serial, q, k)
    normalise_projections(minimax_m2)
    sums = minimax_m2.rms_sumsq_serial(q, k)
    arguments = (q[:, :4], k[:, :2], q_weight[:4], k_weight[:2], sums, 2, 1e-6)
    found = minimax_m2.rms_apply_serial(*arguments)  # of the first of two ranks
    for x, weight, half in zip((q, k), (q_weight, k_weight), found, strict=True):
        whole = torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)
        assert torch.allclose(half, whole[:, : half.shape[1]], atol=1e-6)


def check_rotate_without_yarn():
    import torch
    from sglang.srt.layers.rotary_embedding.factory import get_rope_wrapper
    from sglang_on_cpu.attention import rotate_without_yarn

    arguments = (8, 8, 64, 50000, False, None, None, 1.0, "cpu")
    raises(AssertionError, get_rope_wrapper, *arguments)
    rotate_without_yarn()
    embedding = get_rope_wrapper(*arguments)
    positions, query = torch.tensor([0, 5, 9]), torch.randn(3, 2, 12)[..., 4:]
    rotated, _ = embedding.forward_cpu(positions, query, torch.randn(3, 1, 12)[..., 4:])
    angles = positions[:, None] * 50000.0 ** (-torch.arange(4) / 4)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.view_as_real(torch.view_as_complex(query.reshape(3, 2, 4, 2)) * turns).flatten(
        2
    )
    assert torch.allclose(rotated, expected, atol=1e-6)


def check_allow_seeded_sampling():
    from sglang.srt.arg_groups import choices
    from sglang_on_cpu.sampling import allow_seeded_sampling

    allowed = choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    assert "torch_native" not in allowed
    allow_seeded_sampling()
    assert "torch_native" in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES


def check_sleep_while_paused():
    from sglang.srt.managers.scheduler import Scheduler
    from sglang_on_cpu.processes import sleep_while_paused

    before = Scheduler._record_scheduler_state_for_paused_engine
    for loop in (before, Scheduler.event_loop_normal, Scheduler.event_loop_overlap):
        assert "sleep" not in inspect.getsource(loop)
    sleep_while_paused()
    assert Scheduler._record_scheduler_state_for_paused_engine is not before


def check_wait_for_requests():
    import threading
    import time

    import zmq
    from sglang.srt.managers.data_parallel_controller import DataParallelController
    from sglang_on_cpu.data_parallel import wait_for_requests

    context, dealt = zmq.Context(), []
    inbox, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.bind("inproc://requests")
    sender.connect("inproc://requests")

    class Stopped(Exception):
        pass

    def deal_out(request):
        dealt.append((request, time.monotonic()))
        if request == "stop":
            raise Stopped

    def loop():
        fed = SimpleNamespace(feed=lambda: None)
        this = SimpleNamespace(
            soft_watchdog=fed, recv_from_tokenizer=inbox, _request_dispatcher=deal_out
        )
        with contextlib.suppress(Stopped):
            DataParallelController.event_loop(this)

    def cpu_share(seconds):
        thread = threading.Thread(target=loop)
        thread.start()
        began_s, cpu_s = time.monotonic(), time.process_time()
        time.sleep(seconds)
        share = (time.process_time() - cpu_s) / (time.monotonic() - began_s)
        sent_s = time.monotonic()
        sender.send_pyobj("stop")
        thread.join()
        assert dealt[-1][1] - sent_s < 0.5
        return share

    spinning = cpu_share(0.5)
    wait_for_requests()
    assert cpu_share(0.5) < 0.1 * spinning


def check_fork_workers():
    from sglang.srt.entrypoints import engine
    from sglang_on_cpu.processes import fork_workers

    before = engine._set_envs_and_config
    assert 'mp.set_start_method("spawn", force=True)' in inspect.getsource(before)
    fork_workers()
    assert engine._set_envs_and_config is not before


def check_keep_load_snapshots_in_temp_dir():
    from sglang.srt.managers import load_snapshot
    from sglang_on_cpu.processes import keep_load_snapshots_in_temp_dir

    assert load_snapshot.shm_path_for("x").startswith("/dev/shm/")
    keep_load_snapshots_in_temp_dir()
    assert load_snapshot.shm_path_for("x").startswith(tempfile.gettempdir() + "/sglang_loads_")


def check_leave_megatron_out():
    import sglang.srt.debug_utils.dumper as dumper
    from sglang_on_cpu.processes import leave_megatron_out

    assert "from megatron.core import" in inspect.getsource(dumper)
    leave_megatron_out()
    raises(ImportError, __import__, "megatron.core")


def check_served_models_come_alone():
    from sglang.srt.models.registry import ModelRegistry
    from sglang_on_cpu.models import import_models_when_asked

    assert set(ModelRegistry.models) == {"Qwen3MoeForCausalLM"}
    before = set(sys.modules)
    import_models_when_asked()
    assert ModelRegistry.is_arch_supported("Glm4MoeForCausalLM")
    found = [
        ModelRegistry.resolve_model_cls([name])[0]
        for name in ("Glm4MoeForCausalLM", "Qwen3MoeForCausalLM")
    ]
    assert [cls.__name__ for cls in found] == ["Glm4MoeForCausalLM", "Qwen3MoeForCausalLM"]
    imported = [name for name in set(sys.modules) - before if name.startswith("sglang.srt.models.")]
    assert "sglang.srt.models.glm4_moe" in imported and len(imported) < 20, imported
    assert ModelRegistry.is_arch_supported("GemmaForCausalLM"), (
        "the others are imported when asked for"
    )


def check_murmur_hash():
    import sgl_kernel  # noqa: F401
    import torch

    def by_hand(seed, position, column):
        hash_ = 0
        for key in (seed & 0xFFFFFFFF, seed >> 32, position, column):
            key = key * 0xCC9E2D51 & 0xFFFFFFFF
            key = (key << 15 | key >> 17) * 0x1B873593 & 0xFFFFFFFF
            hash_ ^= key
            hash_ = ((hash_ << 13 | hash_ >> 19) & 0xFFFFFFFF) * 5 + 0xE6546B64 & 0xFFFFFFFF
        hash_ ^= 16
        hash_ = (hash_ ^ hash_ >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        hash_ = (hash_ ^ hash_ >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        return hash_ ^ hash_ >> 16

    seeds, positions = [3, 2**63 - 9, 2**40 + 5], [0, 17, 2**20]
    actual = torch.ops.sgl_kernel.murmur_hash32_cpu(
        torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.arange(5)
    )
    expected = [[by_hand(s, p, c) for c in range(5)] for s, p in zip(seeds, positions, strict=True)]
    assert actual.dtype == torch.uint32 and actual.tolist() == expected


def check_pool_functions():
    import torch
    from sgl_kernel import assign_req_to_token_pool_cpu, copy_all_layer_kv_cache_cpu

    table = torch.zeros(3, 6, dtype=torch.int32)
    one, two = torch.tensor([2, 0]), torch.tensor([1, 0])
    assign_req_to_token_pool_cpu(
        one, table, two, two + torch.tensor([2, 3]), torch.arange(10, 15), 6
    )
    assert table.tolist() == [[12, 13, 14, 0, 0, 0], [0] * 6, [0, 10, 11, 0, 0, 0]]
    layers = [torch.arange(8.0).view(4, 2), torch.arange(8.0).view(4, 2) + 100]
    pointers = torch.tensor([layer.data_ptr() for layer in layers])
    copy_all_layer_kv_cache_cpu(
        pointers, torch.tensor([8, 8]), torch.tensor([0, 1]), torch.tensor([1, 3])
    )
    assert layers[0].tolist() == [[2, 3], [6, 7], [4, 5], [6, 7]]
    assert layers[1][0].tolist() == [102, 103]


def check_kernels_cannot_be_launched():
    import sgl_kernel
    import torch
    import triton

    @triton.jit
    def some_kernel(x):
        pass

    raises(NotImplementedError, some_kernel[(1,)], 1, match="some_kernel")
    raises(
        NotImplementedError,
        sgl_kernel.moe_align_block_size,
        match="sgl_kernel.moe_align_block_size",
    )
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")


def names() -> list[str]:
    return [name for name in globals() if name.startswith("check_")]


if __name__ == "__main__":
    results = {}
    for name in names():
        try:
            globals()[name]()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    sys.stdout.write("\n" + json.dumps(results))
