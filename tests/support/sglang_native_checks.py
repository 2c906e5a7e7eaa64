"""Checks of the patches that run compiled code; see sglang_on_cpu_checks.py.

tests/scenarios/rollout/test_native_forward.py compares engines with transformers.
"""

# pyright: reportMissingImports=false

from types import SimpleNamespace

import pytest
import torch

from tests.support.upstream import assert_defect


def check_sample_in_one_pass():
    from sglang.srt.layers import sampler
    from sglang_on_cpu.sampling import sample_in_one_pass

    original = sampler.multinomial_with_seed
    sample_in_one_pass()
    native = sampler.multinomial_with_seed
    assert_defect("sample_in_one_pass", native is not original)
    for num_rows, vocab_size, spread in (
        (64, 7, 1.0),
        (64, 1000, 0.01),
        (32, 130, 20.0),
        (9, 1, 1),
    ):
        generator = torch.Generator().manual_seed(vocab_size)
        logits = spread * torch.randn(num_rows, vocab_size, generator=generator)
        logits[1::3, : vocab_size // 2] = -torch.inf
        logprobs = torch.log_softmax(logits, -1)
        seeds = torch.randint(-(2**62), 2**62, (num_rows,), generator=generator)
        positions = torch.randint(0, 2**20, (num_rows,), generator=generator)
        expected = original(logprobs, seeds, positions)
        actual = native(logprobs, seeds, positions)
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected), (num_rows, vocab_size, spread)
        in_double = logprobs.double()
        assert torch.equal(native(in_double, seeds, positions), expected)


def check_sample_by_share():
    from sglang.srt.layers import sampler
    from sglang_on_cpu.sampling import sample_in_one_pass

    original = sampler.sampling_from_probs_torch
    sample_in_one_pass()
    native = sampler.sampling_from_probs_torch
    assert native is not original
    for num_rows, vocab_size, spread in ((500, 7, 1.0), (200, 1000, 0.01), (300, 130, 20.0)):
        torch.manual_seed(vocab_size)
        logits = spread * torch.randn(num_rows, vocab_size)
        logits[1::3, : vocab_size // 2] = -torch.inf
        logits[2::3, vocab_size // 2 :] = -torch.inf
        probs = torch.softmax(logits, -1)
        torch.manual_seed(1)
        shares = torch.rand(num_rows, 1, dtype=torch.float64)
        torch.manual_seed(1)
        tokens = native(probs)
        assert tokens.dtype == torch.int32
        ends = probs.double().cumsum(-1) / probs.double().sum(-1, keepdim=True)
        expected = torch.searchsorted(ends, shares, right=True)[:, 0]
        moved = (tokens != expected).nonzero()[:, 0]
        gaps = (ends - shares).abs().min(-1).values
        assert bool((gaps[moved] < 1e-6).all()) and len(moved) < 3, moved
        assert bool((probs.gather(1, tokens[:, None].long()) > 0).all())
    whole = torch.full((3, 130), 0.0)
    whole[:, 40] = 1.0
    assert native(whole).tolist() == [40, 40, 40]
    for wrong in (torch.nan, torch.inf, -1.0):
        probs = torch.where(torch.arange(130) == 3, wrong, whole)
        torch.manual_seed(2)
        tokens = native(probs)
        torch.manual_seed(2)
        torch.rand(3, dtype=torch.float64)
        assert torch.equal(tokens, original(probs))
    seeds, positions = torch.arange(3), torch.arange(3)
    seeded = native(whole, seeds, positions)
    assert torch.equal(seeded, original(whole, seeds, positions))


def check_run_in_compiled_code():
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang_on_cpu.native_forward import check_server, run_in_compiled_code
    from sglang_on_cpu.native_layers import UnsupportedError, read_decoder

    load_model = ModelRunner.load_model
    run_in_compiled_code()
    assert ModelRunner.load_model is not load_model

    check_server(server_args())
    for name, value in (("tp_size", 2), ("enable_lora", True), ("speculative_algorithm", "EAGLE")):
        with pytest.raises(UnsupportedError, match=f"{name}={value}"):
            check_server(server_args(**{name: value}))

    class OtherLayer(torch.nn.Module):
        pass

    other = SimpleNamespace(model=SimpleNamespace(layers=[OtherLayer()]))
    with pytest.raises(UnsupportedError, match="layers of class OtherLayer"):
        read_decoder(other)
    with pytest.raises(UnsupportedError, match=r"SimpleNamespace has no model\.layers"):
        read_decoder(SimpleNamespace())


def check_native_forward_leaves_long_prefill_to_torch():
    from sglang_on_cpu.native_forward import MAX_PREFILL_PAIRS, NativeForward

    def takes(query_lens, key_lens, is_decode=False):
        mode = SimpleNamespace(is_decode=lambda: is_decode, is_extend=lambda: not is_decode)
        lens = {"extend_seq_lens_cpu": query_lens, "seq_lens_cpu": torch.tensor(key_lens)}
        batch = SimpleNamespace(forward_mode=mode, encoder_lens=None, **lens)
        return NativeForward.takes(SimpleNamespace(), batch)

    side = int(MAX_PREFILL_PAIRS**0.5)
    assert takes([side], [side])
    assert not takes([side, 1], [side, side * side])
    assert takes([1], [side], is_decode=True)


def server_args(**changes):
    from sglang_on_cpu.native_forward import PLAIN_SERVER

    return SimpleNamespace(**{**PLAIN_SERVER, **changes})
