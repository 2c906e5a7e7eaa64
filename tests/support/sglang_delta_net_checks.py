"""Checks of the stand-ins for SGLang's gated delta nets: prompts, and tokens after them."""

# pyright: reportMissingImports=false

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.support.upstream import assert_defect, fails_without

KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 8, 5
LENS = (3, 70)
SLOTS = torch.tensor([4, 1])
STARTS = torch.tensor([0, 3, 73])


def check_norm_gated_outputs() -> None:
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.kernels.ops.attention.fla.layernorm_gated import RMSNorm
    from sglang_on_cpu.delta_net import norm_gated_outputs
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    torch.manual_seed(0)
    x, gate = torch.randn(6, VALUE), torch.randn(6, VALUE)
    oracle = Qwen3NextRMSNormGated(VALUE)
    oracle.weight.data.copy_(torch.randn(VALUE))
    norms = (FusedRMSNormGated(VALUE, eps=1e-6, activation="silu"), RMSNorm(VALUE, eps=1e-6))
    for norm, error in zip(norms, (NotImplementedError, AssertionError), strict=True):
        norm.weight.data.copy_(oracle.weight)
        with fails_without("norm_gated_outputs", error):
            norm(x, gate)
    norm_gated_outputs()
    for norm in norms:
        torch.testing.assert_close(norm(x, gate), oracle(x, gate))


def check_delta_net_of_prompts_and_tokens() -> None:
    """Prompts cut in two, and tokens after them, give what transformers gives for the whole."""
    from sgl_kernel import mamba
    from transformers.models.qwen3_next import modeling_qwen3_next as oracle

    torch.manual_seed(0)
    num_tokens = sum(LENS)
    a, b = torch.randn(num_tokens, HEADS), torch.randn(num_tokens, HEADS)
    logs, bias = torch.rand(HEADS), torch.randn(HEADS)
    q, k = (torch.randn(1, num_tokens, KEY_HEADS, KEY) for _ in range(2))
    v = torch.randn(1, num_tokens, HEADS, VALUE)
    states = torch.zeros(6, HEADS, VALUE, KEY)
    gates = torch.ops.sgl_kernel.fused_gdn_gating_cpu(logs, a, b, bias)
    before, last = [], []
    for first, length in zip((0, 3), LENS, strict=True):
        before += range(first, first + length - 1)
        last.append(first + length - 1)
    starts = torch.tensor([0, LENS[0] - 1, num_tokens - 2])
    whole = [x[:, before] for x in (q, k, v, *gates)]
    got, _, _ = mamba.chunk_gated_delta_rule_cpu(
        *whole, initial_state=states, cu_seqlens=starts, initial_state_indices=SLOTS
    )
    more = torch.ops.sgl_kernel.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=logs,
        dt_bias=bias,
        q=q[:, last],
        k=k[:, last],
        v=v[:, last],
        a=a[last],
        b=b[last],
        initial_state_source=states,
        initial_state_indices=SLOTS,
        cu_seqlens=torch.arange(3),
        use_qk_l2norm_in_kernel=True,
        softplus_beta=1.0,
        softplus_threshold=20.0,
    )
    out = torch.empty_like(v)
    out[:, before], out[:, last] = got, more
    q, k = (x.repeat_interleave(HEADS // KEY_HEADS, 2) for x in (q, k))
    for i, (first, length) in enumerate(zip((0, 3), LENS, strict=True)):
        own = [x[:, first : first + length] for x in (q, k, v, *gates)]
        wanted, state = oracle.torch_recurrent_gated_delta_rule(
            *own, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        torch.testing.assert_close(out[:, first : first + length], wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states[SLOTS[i]].mT, state[0], rtol=1e-5, atol=1e-5)
    assert not states[[0, 2, 3, 5]].any()


def check_convolution_of_prompts_and_tokens() -> None:
    from sgl_kernel import mamba
    from transformers.models.qwen3_next import modeling_qwen3_next as oracle

    torch.manual_seed(0)
    x_DT, weight = torch.randn(6, sum(LENS)), torch.randn(6, 4)
    states = torch.randn(6, 6, 3)
    untouched = states[[0, 2, 3, 5]].clone()
    got = [_convolve(mamba, x_DT[:, :1], x_DT[:, 3:40], weight, states, [False, False])]
    got.append(_convolve(mamba, x_DT[:, 1:2], x_DT[:, 40:72], weight, states, [True, True]))
    more = mamba.causal_conv1d_update_cpu(
        x_DT[:, [2, 72]].T, states, weight, None, "silu", conv_state_indices=SLOTS
    )
    parts = [[got[0][i], got[1][i], more[[i]].T] for i in range(2)]
    for own, x in zip(parts, (x_DT[:, :3], x_DT[:, 3:]), strict=True):
        wanted = oracle.causal_conv1d_fn(x[None], weight, activation="silu")[0]
        torch.testing.assert_close(torch.cat(own, 1), wanted)
    assert torch.equal(states[[0, 2, 3, 5]], untouched)


DRAFTS = 3
ROWS = torch.tensor([2, 0, 1])
"""Where the states behind drafts of two requests are kept, and one more."""


def check_convolution_of_drafts() -> None:
    """Outputs, and inputs that are kept, are those of as many tokens one after another; what a
    request had stays until drafts are accepted.
    """
    from sgl_kernel import mamba

    torch.manual_seed(0)
    width = 4
    x_BDT, weight = torch.randn(2, 6, DRAFTS), torch.randn(6, width)
    conv_states = torch.randn(6, 6, width - 1)
    windows = torch.zeros(3, DRAFTS, 6, width - 1)
    begun = conv_states.clone()
    out = mamba.causal_conv1d_update_cpu(
        *(x_BDT, conv_states, weight, None, "silu", SLOTS),
        intermediate_conv_window=windows,
        intermediate_state_indices=ROWS[:2],
        retrieve_parent_token=None,
    )
    assert torch.equal(conv_states, begun) and not windows[1].any()
    assert out.transpose(1, 2).view(6, -1).shape == (6, 6)
    for draft in range(DRAFTS):
        own = mamba.causal_conv1d_update_cpu(
            *(x_BDT[..., draft], begun, weight, None, "silu", SLOTS)
        )
        torch.testing.assert_close(out[..., draft], own)
        assert torch.equal(windows[ROWS[:2], draft], begun[SLOTS.long()])


def check_delta_rule_of_drafts() -> None:
    """So are outputs and states of the delta rule."""
    from sgl_kernel import mamba  # which gives torch.ops.sgl_kernel the rule

    assert mamba.__doc__
    torch.manual_seed(0)
    a, b = torch.randn(2, 2 * DRAFTS, HEADS)
    q, k = (torch.randn(1, 2 * DRAFTS, KEY_HEADS, KEY) for _ in range(2))
    v = torch.randn(1, 2 * DRAFTS, HEADS, VALUE)
    states = torch.randn(6, HEADS, VALUE, KEY)
    behind = torch.zeros(3, DRAFTS, HEADS, VALUE, KEY)
    begun = states.clone()
    logs, bias = torch.rand(HEADS), torch.randn(HEADS)

    def run(kept: Tensor, tokens: slice, **of_drafts: Any) -> Tensor:
        return torch.ops.sgl_kernel.fused_sigmoid_gating_delta_rule_update_cpu(
            **{"A_log": logs, "dt_bias": bias, "a": a[tokens], "b": b[tokens]},
            **{"q": q[:, tokens], "k": k[:, tokens], "v": v[:, tokens]},
            **{"initial_state_source": kept, "initial_state_indices": SLOTS},
            **{"cu_seqlens": torch.arange(3), "use_qk_l2norm_in_kernel": True},
            **{"softplus_beta": 1.0, "softplus_threshold": 20.0, **of_drafts},
        )

    out = run(
        *(states, slice(None)),
        disable_state_update=True,
        intermediate_states_buffer=behind,
        intermediate_state_indices=ROWS,
        cache_steps=DRAFTS,
    )
    assert torch.equal(states, begun) and not behind[1].any()
    for draft in range(DRAFTS):
        tokens = slice(draft, None, DRAFTS)
        torch.testing.assert_close(out[:, tokens], run(begun, tokens))
        torch.testing.assert_close(behind[ROWS[:2], draft], begun[SLOTS.long()])


def check_keep_accepted_states() -> None:
    """The state behind the last accepted draft of a request goes to its slot."""
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as module
    from sglang_on_cpu.delta_net import keep_accepted_states

    torch.manual_seed(0)
    caches = SimpleNamespace(
        temporal=torch.zeros(2, 6, HEADS, VALUE, KEY),
        intermediate_ssm=torch.randn(2, 3, 4, HEADS, VALUE, KEY),
        conv=[torch.zeros(2, 6, 6, 3)],
        intermediate_conv_window=[torch.randn(2, 3, 4, 6, 3)],
    )
    arguments = (caches, SLOTS, torch.tensor([0, 3]), torch.tensor([5, 0]), torch.tensor([2, -1]))
    with fails_without("keep_accepted_states", ValueError):
        module.scatter_mamba_states_after_mtp_verify(*arguments)
    keep_accepted_states()
    module.scatter_mamba_states_after_mtp_verify(*arguments)
    parts = ((caches.temporal, caches.intermediate_ssm),)
    for states, behind in (*parts, (caches.conv[0], caches.intermediate_conv_window[0])):
        assert torch.equal(states[:, SLOTS[0]], behind[:, 0, 0])
        assert torch.equal(states[:, SLOTS[1]], behind[:, 1, 3])
        assert torch.equal(states[:, 5], behind[:, 0, 2])  # of the cache of prefixes
        assert not states[:, [0, 2]].any()


def check_gated_attention_and_inputs_of_qwen3_5() -> None:
    from sgl_kernel import qwen3_5  # which gives torch.ops.sgl_kernel the three

    ops = torch.ops.sgl_kernel
    assert qwen3_5.__doc__
    torch.manual_seed(0)
    x, gate = torch.randn(3, 6), torch.randn(3, 6)
    product = x * gate.sigmoid()
    ops.fused_sigmoid_mul_cpu(x, gate)
    torch.testing.assert_close(x, product)
    q_gate, k = torch.randn(3, 2 * 2 * KEY), torch.randn(3, KEY)
    weights = torch.randn(2, KEY)
    q, k_out, gates = ops.fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, *weights, 1e-6, KEY, 2)
    heads = q_gate.view(3, 2, 2, KEY)
    assert torch.equal(gates.view(3, 2, KEY), heads[:, :, 1])
    for got, rows, weight in ((q, heads[:, :, 0], weights[0]), (k_out, k, weights[1])):
        scale = (rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        torch.testing.assert_close(got.view(rows.shape), rows * scale * (1 + weight))
    keys, values = KEY_HEADS * KEY, HEADS * VALUE
    qkvz, ba = torch.randn(3, 2 * keys + 2 * values), torch.randn(3, 2 * HEADS)
    qkv, z, b, a = ops.fused_qkvzba_split_reshape_cat_contiguous_cpu(
        qkvz, ba, KEY_HEADS, HEADS, KEY, VALUE
    )
    assert torch.equal(torch.cat([qkv, z.flatten(1)], 1), qkvz)
    assert torch.equal(torch.cat([b, a], 1), ba)


def check_renew_derived() -> None:
    """SGLang's modules renew what they keep of parameters, whose values and memory are new."""
    from sglang.srt.layers.layernorm import GemmaRMSNorm
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

    from mcore_rl.weight_sync.receiver import renew_derived

    model = torch.nn.Module()
    model.norm = GemmaRMSNorm(4)
    model.net = torch.nn.Module()
    model.net.conv1d = torch.nn.Conv1d(6, 6, 4, groups=6, bias=False)
    weight = model.net.conv1d.weight
    heads = dict.fromkeys(("num_q_heads", "num_k_heads", "num_v_heads"), 1)
    widths = dict.fromkeys(("head_q_dim", "head_k_dim", "head_v_dim"), 2)
    model.net.attn = RadixLinearAttention(
        layer_id=0, conv_weights=weight.data.squeeze(1), **heads, **widths
    )
    model.norm.weight.data.copy_(torch.arange(4.0))
    weight.data = torch.randn(6, 1, 4)
    assert_defect("renew_derived", not torch.equal(model.norm.gemma_weight, torch.arange(1.0, 5.0)))
    renew_derived(model)
    torch.testing.assert_close(model.norm.gemma_weight, torch.arange(1.0, 5.0))
    assert model.net.attn.conv_weights.data_ptr() == weight.data_ptr()
    assert model.net.attn.conv_weights.shape == (6, 4)


def _convolve(
    mamba: Any, a: Tensor, b: Tensor, weight: Tensor, states: Tensor, known: list[bool]
) -> tuple[Tensor, Tensor]:
    starts = torch.tensor([0, a.shape[1], a.shape[1] + b.shape[1]])
    out = mamba.causal_conv1d_fn_cpu(
        torch.cat([a, b], 1),
        weight,
        None,
        activation="silu",
        conv_states=states,
        has_initial_state=torch.tensor(known),
        cache_indices=SLOTS,
        query_start_loc=starts,
        seq_lens_cpu=None,
    )
    return out[:, : a.shape[1]], out[:, a.shape[1] :]
