"""A patch of megatron-core's checkpoint writer that applies on CPU and GPU alike."""

import queue


def keep_write_results_in_process() -> None:
    """Collect the results of checkpoint writes in a queue of this process.

    megatron-core 0.16.1 starts a manager process at the first save to carry results from forked
    writers. The manager takes seconds to start and outlives a killed rank. Our saves are written by
    a thread of this process, so a plain queue is enough.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
