"""Runs the ranks of a scene as processes, linked as in a run, and returns their reports."""

import multiprocessing as mp
import pickle
import time
from multiprocessing.connection import wait
from typing import Any

from mcore_rl.process.process_state import wait_killed
from mcore_rl.tools.doctor.sync_ranks import run_rank
from mcore_rl.tools.doctor.sync_scene import Scene, SceneOutcome
from mcore_rl.weight_sync.link_store import LinkStore
from mcore_rl.weight_sync.wire import Action, Link

ACTIONS: tuple[Action, ...] = ("connect", "receive", "swap")


def make_link(scene: Scene, store: LinkStore) -> Link:
    return Link(
        engine="engine-0",
        store_host="127.0.0.1",
        store_port=store.port,
        store_key=store.key,
        num_senders=scene.num_senders,
        num_receivers=scene.num_receivers,
        bucket_bytes=scene.bucket_bytes,
        timeout_s=scene.timeout_s,
        staged=scene.staged,
    )


def run_scene(scene: Scene) -> SceneOutcome:
    """Connect once and sync `num_syncs` versions. Raises RuntimeError if ranks do not answer."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "mcore_rl.tools.doctor.sync_ranks"])
    store = LinkStore.serve("127.0.0.1", scene.timeout_s)
    link = make_link(scene, store)
    store.keep(link)
    pipes = []
    processes = []
    num_ranks = scene.num_senders + scene.num_receivers
    started = context.Barrier(num_ranks)
    for rank in range(num_ranks):
        own_end, child_end = context.Pipe(duplex=False)
        processes.append(
            context.Process(
                target=run_rank, args=(child_end, started, scene, link, rank), daemon=True
            )
        )
        processes[-1].start()
        child_end.close()
        pipes.append(own_end)
    answers: dict[int, Any] = {}
    give_up_s = time.monotonic() + 2 * scene.timeout_s + 20
    while len(answers) < len(pipes) and time.monotonic() < give_up_s:
        waiting: list[Any] = [p for r, p in enumerate(pipes) if r not in answers]
        for pipe in wait(waiting, timeout=1):
            try:
                answers[pipes.index(pipe)] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                answers[pipes.index(pipe)] = None
        if scene.fault is not None and len(answers) == len(pipes) - 1:
            answers.setdefault(scene.fault.rank, None)
    for process in processes:
        process.kill()
        wait_killed(process, "a rank of the check")
    if len(answers) < len(pipes):
        raise RuntimeError(f"only ranks {sorted(answers)} answered")
    results = [answers[rank] for rank in range(len(pipes))]
    for rank in range(scene.num_receivers):
        for action in ACTIONS:
            store.take_report(action, scene.num_senders + rank)
    return SceneOutcome(results[: scene.num_senders], results[scene.num_senders :], store.num_keys)
