"""Checks of the patches of SGLang's attention; see sglang_on_cpu_checks.py."""

# pyright: reportMissingImports=false, reportIndexIssue=false

import inspect
import sys
from types import SimpleNamespace

import torch

from tests.support.upstream import assert_defect, fails_without


def attention_inputs(dtype, seed):
    """A batch of 9 requests in a KV pool of 400 slots, 4 query heads on 2 KV heads."""
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
            assert_defect("batch_attention", len(calls) == 9)  # a call per request
            calls.clear()
            output.fill_(float("nan"))
            actual = functions[1](backend, *args, **options)
            assert not calls
            assert (actual.float() - expected.float()).abs().max() < tolerance


def check_sinks():
    """A sink is a further key whose value is 0; SGLang's torch_native backend has none."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend
    from sglang_on_cpu.attention import attend, batch_attention, make_groups

    source = inspect.getsource(sys.modules[Backend.__module__])
    assert_defect("the sinks of batch_attention", "sinks" not in source)
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
    branch = source.split('model_arch in ["GptOssForCausalLM"]')[1]
    branch = branch.split("supported_backends and")[0]
    assert_defect("admit_torch_native", '"torch_native",' not in branch)
    assert "attention_backends_of(" in branch
    settings = SimpleNamespace(
        attention_backend="torch_native",
        prefill_attention_backend=None,
        decode_attention_backend=None,
    )
    assert model_hook.attention_backends_of(settings) == ("torch_native", "torch_native")
    admit_torch_native()
    assert model_hook.attention_backends_of(settings) == ("intel_amx", "intel_amx")


def check_batch_attention_ignores_other_requests():
    """Padding must not let a request read another request's keys, even if those are NaN."""
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


def check_rotate_without_yarn():
    from sglang.srt.layers.rotary_embedding.factory import get_rope_wrapper
    from sglang_on_cpu.attention import rotate_without_yarn

    arguments = (8, 8, 64, 50000, False, None, None, 1.0, "cpu")
    with fails_without("rotate_without_yarn", AssertionError):
        get_rope_wrapper(*arguments)
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


def check_absorb_latents():
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )
    from sglang_on_cpu.attention import absorb_latents

    unknown = AttentionBackendRegistry.get_handler("no such backend")
    assert_defect("absorb_latents", AttentionBackendRegistry.get_handler("torch_native") is unknown)
    absorb_latents()
    choose = AttentionBackendRegistry.get_handler("torch_native")
    assert choose(None, None) == AttnForwardMethod.MLA
