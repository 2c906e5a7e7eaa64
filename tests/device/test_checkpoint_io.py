"""Results of checkpoint writes stay in the process, and megatron-core would not keep them there."""

import inspect
import queue

from megatron.core.dist_checkpointing.strategies import filesystem_async

from mcore_rl.device.training_patches import keep_write_results_in_process
from tests.support.upstream import assert_defect


def test_results_stay_in_the_process() -> None:
    source = inspect.getsource(filesystem_async.get_write_results_queue)
    assert_defect("checkpoint_io.keep_write_results_in_process", ".Manager()" in source)
    keep_write_results_in_process()
    first = filesystem_async.get_write_results_queue()
    assert isinstance(first, queue.Queue)
    keep_write_results_in_process()
    assert filesystem_async.get_write_results_queue() is first
