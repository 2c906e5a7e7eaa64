"""Where megatron-core's checkpoint writer puts its results: a queue of this process, on CPU and GPU alike."""

import queue


def keep_write_results_in_process() -> None:
    """megatron-core 0.16.1 starts a manager process at the first save to carry results from forked writers.

    It takes seconds to start and outlives a killed rank. Our saves are written by a thread, so a plain queue
    will do.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
