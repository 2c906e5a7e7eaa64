"""Scenes: the route that bytes take, and the reports of those who lived."""

from mcore_rl.tools.doctor.toy_engine import Received, Scene, SceneOutcome, row_cut
from mcore_rl.weight_sync.transports.select import (
    make_gloo_transport,
    make_gpu_pair_transport,
    select_transport,
)
from mcore_rl.weight_sync.wire import Report


def test_bytes_between_machines_take_nccl_only_from_gpu_to_gpu() -> None:
    def transport(**options: object) -> object:
        return Scene(row_cut, 1, 1, **options).make_transport  # type: ignore[arg-type]

    assert transport() is select_transport
    assert transport(on_gpu=(True, True)) is select_transport
    assert transport(between_machines=True) is make_gloo_transport
    assert transport(between_machines=True, on_gpu=(True, False)) is make_gloo_transport
    assert transport(between_machines=True, on_gpu=(True, True)) is make_gpu_pair_transport


def test_reports_are_those_of_the_living_by_rank() -> None:
    first, second, third = (Report(name) for name in "abc")
    outcome = SceneOutcome([None, [first]], [Received([second, third], [], [])], 0)
    assert outcome.reports == [first, second, third]
