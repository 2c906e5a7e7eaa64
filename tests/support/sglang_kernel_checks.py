"""Checks of the import stand-ins, the patched kernels and sampling; see sglang_on_cpu_checks.py."""

# pyright: reportMissingImports=false, reportIndexIssue=false

import importlib.util
import itertools
import re
import sys
from pathlib import Path
from types import SimpleNamespace, new_class

import pytest
import torch

from tests.support.int4_oracle import compress_with_library, decompress_with_library
from tests.support.upstream import assert_defect, fails_without


def check_group_experts():
    from sglang.srt.layers.moe import fused_moe_native
    from sglang_on_cpu.experts import group_experts

    original = fused_moe_native.moe_forward_native
    group_experts()
    grouped = fused_moe_native.moe_forward_native
    weights, ids = torch.rand(10, 3).topk(2)
    for hidden, kind in itertools.product((8, 6), ("plain", "gpt_oss")):
        layer, config = make_experts(kind, hidden)
        x = torch.randn(10, hidden)
        expected = original(layer, x, (weights, ids, None), config)
        assert torch.allclose(grouped(layer, x, (weights, ids, None), config), expected, atol=1e-5)

        local = torch.where(ids == 1, -1, ids)  # expert 1 is another rank's
        with fails_without("group_experts", RuntimeError, IndexError):
            original(layer, x, (weights, local, None), config)
        expected = original(layer, x, (weights * (ids != 1), ids, None), config)
        layer.num_experts = 6  # of all ranks
        actual = grouped(layer, x, (weights, local, None), config)
        assert torch.allclose(actual, expected, atol=1e-5)
        nothing = grouped(layer, x, (weights, torch.full_like(ids, -1), None), config)
        assert torch.equal(nothing, torch.zeros(10, hidden))


def check_unpack_experts():
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors
    from sglang_on_cpu.experts import unpack_experts

    torch.manual_seed(0)
    config = MoeRunnerConfig(activation="silu")
    packed = SimpleNamespace(block_shape=[0, 32], use_int4_w4a16=True)
    plain = SimpleNamespace(num_experts=3, w13_weight=[], w2_weight=[])
    for name, shape in (("w13", (64, 64)), ("w2", (64, 32))):
        words, scales = [], []
        for _ in range(3):
            parts = compress_with_library(torch.randn(shape, dtype=torch.bfloat16))
            words.append(parts["weight_packed"].view(torch.uint8))
            scales.append(parts["weight_scale"])
            getattr(plain, f"{name}_weight").append(decompress_with_library(parts))
        setattr(packed, f"{name}_weight", torch.stack(words))
        setattr(packed, f"{name}_scale", torch.stack(scales))
        setattr(plain, f"{name}_weight", torch.stack(getattr(plain, f"{name}_weight")))

    class Scheme(compressed_tensors.CompressedTensorsWNA16TritonMoE):
        def __init__(self):
            pass

        def get_triton_quant_info(self, layer):
            return packed

    x = torch.randn(10, 64, dtype=torch.bfloat16)
    weights, ids = torch.rand(10, 3).topk(2)
    dispatched = SimpleNamespace(hidden_states=x, topk_output=(weights, ids, None))
    with fails_without("unpack_experts", Exception):
        scheme = Scheme()
        scheme.create_moe_runner(None, config)
        scheme.apply_weights(None, dispatched)
    unpack_experts()
    scheme = Scheme()
    scheme.create_moe_runner(None, config)
    expected = fused_moe_native.moe_forward_native(plain, x, (weights, ids, None), config)
    assert torch.equal(scheme.apply_weights(None, dispatched).hidden_states, expected)


def make_experts(kind: str, hidden: int) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Return three experts of random weights and their settings; those of gpt-oss have biases."""
    torch.manual_seed(0)
    layer = SimpleNamespace(
        num_experts=3,
        w13_weight=torch.randn(3, 12, hidden),
        w2_weight=torch.randn(3, hidden, 6),
        w13_weight_bias=torch.randn(3, 12) if kind == "gpt_oss" else None,
        w2_weight_bias=torch.randn(3, hidden) if kind == "gpt_oss" else None,
    )
    config = SimpleNamespace(
        activation="silu",
        apply_router_weight_on_input=False,
        gemm1_alpha=1.7 if kind == "gpt_oss" else None,
        gemm1_clamp_limit=7.0,
    )
    return layer, config


def check_gate_shared_expert():
    from sglang.kernels.ops.elementwise.elementwise import (
        fused_gate_sigmoid_mul,
        fused_gate_sigmoid_mul_add,
    )
    from sglang_on_cpu.experts import gate_shared_expert

    torch.manual_seed(0)
    hidden, weight, shared, routed = (
        torch.randn(5, 8),
        torch.randn(8),
        torch.randn(5, 8),
        torch.randn(5, 8),
    )
    with fails_without("gate_shared_expert", NotImplementedError):
        fused_gate_sigmoid_mul(hidden, weight, shared)
    gate_shared_expert()
    expected = torch.sigmoid(hidden @ weight)[:, None] * shared
    assert torch.allclose(fused_gate_sigmoid_mul(hidden, weight, shared), expected)
    total = routed.clone()
    fused_gate_sigmoid_mul_add(hidden, weight, shared, total)
    assert torch.allclose(total, routed + expected)


def check_normalize_projections():
    from sglang.srt.models import minimax_m2
    from sglang_on_cpu.models import normalize_projections

    torch.manual_seed(0)
    q, k, q_weight, k_weight = torch.randn(5, 8), torch.randn(5, 4), torch.randn(8), torch.randn(4)
    with fails_without("normalize_projections", AssertionError):
        minimax_m2.rms_sumsq_serial(q, k)
    normalize_projections(minimax_m2)
    sums = minimax_m2.rms_sumsq_serial(q, k)
    arguments = (q[:, :4], k[:, :2], q_weight[:4], k_weight[:2], sums, 2, 1e-6)
    halves = minimax_m2.rms_apply_serial(*arguments)  # those of the first of two ranks
    for x, weight, half in zip((q, k), (q_weight, k_weight), halves, strict=True):
        whole = torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)
        assert torch.allclose(half, whole[:, : half.shape[1]], atol=1e-6)


def check_allow_seeded_sampling():
    from sglang.srt.arg_groups import choices
    from sglang_on_cpu.sampling import allow_seeded_sampling

    allowed = choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    assert_defect("allow_seeded_sampling", "torch_native" not in allowed)
    allow_seeded_sampling()
    assert "torch_native" in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES


def check_murmur_hash():
    import sgl_kernel  # noqa: F401

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


def check_any_name_can_be_imported_from_a_stand_in():
    import torchvision
    import torchvision.transforms.v2 as transforms

    subclass = new_class("Resize", (transforms.Resize,), {"interpolation": "none"})
    assert issubclass(subclass, transforms.Resize)
    assert transforms.InterpolationMode.BICUBIC == "InterpolationMode.BICUBIC"
    assert torchvision.io.decode is torchvision.io.decode

    def function():
        pass

    assert torchvision.ops.register(function) is function
    assert torchvision.ops.register("name", flag=True)(function) is function
    assert "nms" not in torchvision.ops and list(torchvision.ops) == []
    with pytest.raises(AttributeError):
        torchvision.__no_such_dunder__  # noqa: B018


def check_kernels_cannot_be_launched():
    import sgl_kernel
    import triton

    @triton.jit
    def some_kernel(x):
        pass

    with pytest.raises(NotImplementedError, match="some_kernel"):
        some_kernel[(1,)](1)
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.moe_align_block_size"):
        sgl_kernel.moe_align_block_size()
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")


def check_keep_adapters_in_plain_memory():
    from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend
    from sglang_on_cpu.adapters import keep_adapters_in_plain_memory

    device = torch.device("cpu")
    kinds = {"is_idle": False, "is_decode": False, "is_target_verify": False, "is_extend": True}
    mode = SimpleNamespace(**{name: lambda value=value: value for name, value in kinds.items()})
    lens_N = [3, 2]
    lens = {"extend_seq_lens": torch.tensor(lens_N), "extend_seq_lens_cpu": lens_N}
    batch = SimpleNamespace(forward_mode=mode, batch_size=2, **lens)

    def prepare() -> TorchNativeLoRABackend:
        backend = TorchNativeLoRABackend(2, device)
        backend.prepare_lora_batch(batch, [0, 1], [0, 1], [0.0, 0.5], use_cuda_graph=False)
        return backend

    with fails_without("keep_adapters_in_plain_memory", RuntimeError):
        prepare()
    keep_adapters_in_plain_memory()
    backend = prepare()
    first, second = torch.randn(2, 1, 4), torch.randn(2, 6, 1)
    x_TI = torch.randn(5, 4)
    offsets = torch.tensor([0, 6])
    thin = backend.run_lora_a_sgemm(x_TI, first)
    added = backend.run_lora_b_sgemm(thin, second, offsets, torch.zeros(5, 6))
    assert not added[:3].any()
    expected = 0.5 * x_TI[3:] @ first[1].T @ second[1].T
    assert torch.allclose(added[3:], expected, atol=1e-6)


def check_keep_routed_experts_in_plain_memory():
    from sglang.srt.mem_cache.pool_host import common
    from sglang_on_cpu.experts import keep_routed_experts_in_plain_memory

    options = {"dtype": torch.int32, "device": "cpu", "pin_memory": True}
    allocator = common.HostTensorAllocator()
    with fails_without("keep_routed_experts_in_plain_memory", AssertionError):
        common.ALLOC_MEMORY_FUNCS["cpu"]((4, 2), allocator=allocator, **options)
    keep_routed_experts_in_plain_memory()
    buffer = common.ALLOC_MEMORY_FUNCS["cpu"]((4, 2), allocator=allocator, **options)
    assert buffer.shape == (4, 2) and buffer.dtype == torch.int32


def check_stand_in_packages_are_imported():
    """An engine loads modules that cannot be imported without the stand-in packages."""
    import sglang.srt.managers.scheduler  # noqa: F401

    for package in ("sgl_kernel", "triton", "torchvision"):
        assert_defect(f"the stand-in {package}", _modules_that_need(package))


def _modules_that_need(package):
    """Return the first loaded module of SGLang whose import fails without `package`, or None."""
    imports = re.compile(rf"^\s*(import|from) {package}\b", re.MULTILINE)
    names = [name for name in sys.modules if name.partition(".")[0] == package]
    saved = {name: sys.modules.pop(name) for name in names}
    sys.modules[package] = None  # pyright: ignore[reportArgumentType]
    try:
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if not name.startswith("sglang.") or not file:
                continue
            if imports.search(Path(file).read_text()) and _import_fails(module, package):
                return name
        return None
    finally:
        sys.modules.update(saved)


def _import_fails(module, package):
    """Whether a second copy of the module fails to find `package`."""
    copy = importlib.util.module_from_spec(module.__spec__)
    try:
        module.__spec__.loader.exec_module(copy)
    except ImportError as error:
        return (error.name or "").partition(".")[0] == package
    except Exception:  # some modules register operators, which a second import refuses
        return False
    return False
