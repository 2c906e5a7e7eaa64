"""The work-alike of TEGroupedLinear computes each expert's rows, and is cut as it is."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mcore_rl.cpu.te_workalike import ColumnParallelGroupedLinear, RowParallelGroupedLinear

CONFIG = SimpleNamespace(
    params_dtype=torch.float32, perform_initialization=False, sequence_parallel=False
)


class _Group(SimpleNamespace):
    """The place of a rank in a process group."""

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.num_ranks


def make_experts(kind: type, bias: bool, skip_bias_add: bool, etp_size: int = 1) -> Any:
    groups = SimpleNamespace(expt_tp=_Group(index=0, num_ranks=etp_size))
    experts: Any = kind(
        2,
        6,
        4,
        config=CONFIG,
        init_method=None,
        bias=bias,
        skip_bias_add=skip_bias_add,
        pg_collection=groups,
    )
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    return experts


@pytest.mark.parametrize("bias", [False, True])
def test_each_expert_computes_its_own_rows(bias: bool) -> None:
    torch.manual_seed(0)
    experts = make_experts(ColumnParallelGroupedLinear, bias, skip_bias_add=False)
    rows = torch.randn(5, 6)
    out, returned = experts(rows, [2, 3])
    first = F.linear(rows[:2], experts.weight0, experts.bias0 if bias else None)
    second = F.linear(rows[2:], experts.weight1, experts.bias1 if bias else None)
    torch.testing.assert_close(out, torch.cat([first, second]))
    assert returned is None


def test_a_skipped_bias_is_returned_instead() -> None:
    torch.manual_seed(0)
    experts = make_experts(RowParallelGroupedLinear, bias=True, skip_bias_add=True)
    rows = torch.randn(3, 6)
    out, biases = experts(rows, [3, 0])
    torch.testing.assert_close(out, F.linear(rows, experts.weight0))
    assert biases[0] is experts.bias0 and biases[1] is experts.bias1


def test_expert_tensor_parallelism_cuts_rows_or_columns_but_no_biases() -> None:
    column = make_experts(ColumnParallelGroupedLinear, False, False, etp_size=2)
    row = make_experts(RowParallelGroupedLinear, False, False, etp_size=2)
    assert column.weight0.shape == (2, 6) and column.weight0.partition_dim == 0
    assert row.weight0.shape == (4, 3) and row.weight0.partition_dim == 1
    with pytest.raises(AssertionError, match="expert biases"):
        make_experts(RowParallelGroupedLinear, True, False, etp_size=2)
