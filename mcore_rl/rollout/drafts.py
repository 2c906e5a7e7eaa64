"""Sets SGLang up to speculate, so that each token is drawn with the policy's own probabilities.

n-grams of what was seen -> tree of drafts -> tell_drafts_apart -> SGLang verifies it in a pass
                                                                      |
                          meta_info[COUNTS] of an answer <- count_drafts, by version of weights
"""

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from importlib import import_module
from typing import Any

import numpy as np

from mcore_rl.rollout.draft_choice import Told, Way
from mcore_rl.types import Array, DraftCount, WeightVersion
from mcore_rl.weights.models.mtp import DRAFT_MODEL

COUNTS = "draft_counts"
"""Name in an engine's answer of what `count_drafts` has counted."""
COMPILERS = ("c++", "g++", "clang++")
DraftCounts = Mapping[WeightVersion, DraftCount]
CHECKED = Told(Way.DRAFT, gain=None)
"""A pass of an engine that measures nothing."""


def find_compilers() -> None:
    """Put the programs of this interpreter's environment last in PATH, such as its ninja.

    Raises ValueError if SGLang could not compile its n-grams, as it does at the first start.
    """
    path = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join([path, sysconfig.get_path("scripts")])
    if shutil.which("ninja") is None or not any(map(shutil.which, COMPILERS)):
        raise ValueError(
            "rollout.speculate=ngram: SGLang compiles its n-grams with ninja and a C++ compiler"
            f" ({', '.join(COMPILERS)}), and this machine lacks them: install them, or set"
            " rollout.speculate=none"
        )


def tell_drafts_apart() -> None:
    """Have no two drafts behind the same tokens be the same, in the scheduler that calls this.

    Where n-grams match less than a whole tree, SGLang fills it with drafts of token 0 behind the
    root. Its sampling kernel adds up the probabilities of the drafts behind a node, so it draws
    token 0 as many times too often.
    """
    module: Any = import_module("sglang.srt.speculative.cpp_ngram.ngram_corpus")
    find_drafts = module.NgramCorpus.batch_get

    def batch_get(self: Any, req_ids: Any, *arguments: Any) -> tuple[Array, Array]:
        tokens, mask = find_drafts(self, req_ids, *arguments)
        num_trees = len(req_ids)
        tokens_BN = tokens.reshape(num_trees, -1)
        mask_BNN = mask.reshape(*tokens_BN.shape, -1)
        for tree in range(num_trees):
            move_repeated(tokens_BN[tree], mask_BNN[tree])
        return tokens, mask

    module.NgramCorpus.batch_get = batch_get


def move_repeated(tokens_N: Array, mask_NN: Array) -> None:
    """Put each draft that repeats one behind the same node behind that one, in the tree's mask.

    mask_NN[i, j] is whether draft j is before draft i, or i itself. A node comes before its
    children.
    """
    children: dict[tuple[int, int], int] = {}
    moved: set[int] = set()
    for node, token in enumerate(tokens_N.tolist()[1:], 1):
        parent = first = int(np.flatnonzero(mask_NN[node, :node])[-1])
        while (parent, token) in children:
            parent = children[parent, token]
        children[parent, token] = node
        if parent != first or parent in moved:
            mask_NN[node, :node] = mask_NN[parent, :node]
            moved.add(node)


def show_draft_model() -> None:
    """Let the served model name its draft model, which weight sync updates with it, in the
    scheduler that calls this.

    The draft model has its own layer, and the embedding and output layer of the served model.
    """
    worker: Any = import_module("sglang.srt.speculative.eagle_worker_v2").EagleDraftWorker
    share = worker.init_lm_head

    def init_lm_head(self: Any) -> None:
        share(self)
        # Not as a submodule: the served model's loader and SGLang's checks see its own parts alone.
        vars(self.target_worker.model_runner.model)[DRAFT_MODEL] = self.draft_runner.model

    worker.init_lm_head = init_lm_head


def count_drafts(tell_pass: Callable[[], Told] = lambda: CHECKED) -> None:
    """Have answers tell of each version of weights what its passes did for the request, as
    [version, *fields of DraftCount] each, in the scheduler that calls this.

    SGLang counts drafts for a request, whatever weights it was drawn with.

    tell_pass   returns what the pass was that is being processed; it checked drafts by default
    """
    schedule_batch: Any = import_module("sglang.srt.managers.schedule_batch")
    context: Any = import_module("sglang.srt.runtime_context")
    streamer: Any = import_module(
        "sglang.srt.managers.scheduler_components.output_streamer"
    ).SchedulerOutputStreamer
    assert not streamer.has_additional_customized_info, "SGLang has fields of its own there"
    note = schedule_batch.Req.update_spec_correct_drafts_histogram

    def note_by_version(req: Any, num_accepted: int) -> None:
        note(req, num_accepted)
        version = context.get_serving().weight_version
        counts = vars(req).setdefault(COUNTS, {})
        if version not in counts:
            counts[version] = list(astuple(DraftCount()))
        add_pass(counts[version], tell_pass(), num_accepted)

    def list_counts(self: Any, reqs: list[Any]) -> dict[str, list[Any]]:
        finished = [getattr(req, COUNTS, {}) if req.finished() else {} for req in reqs]
        return {COUNTS: [[[v, *counts[v]] for v in counts] for counts in finished]}

    schedule_batch.Req.update_spec_correct_drafts_histogram = note_by_version
    streamer.has_additional_customized_info = True
    streamer.build_additional_customized_info = list_counts


def add_pass(sums: list[float], told: Told, num_accepted: int) -> None:
    """Add one pass of a request to sums, which are in the order of the fields of DraftCount.

    A scheduler does so in each pass for each of its requests, so nothing is made here.
    """
    if told.way is Way.DRAFT:
        sums[0] += 1
        sums[1] += num_accepted
    else:
        sums[2] += 1
    if told.gain is not None:
        sums[3] += 1
        sums[4] += told.gain


def sum_counts(*counts: DraftCounts) -> dict[WeightVersion, DraftCount]:
    """Return the sums of each version."""
    sums: dict[WeightVersion, DraftCount] = {}
    for each in counts:
        for version, count in each.items():
            sums[version] = sums.get(version, DraftCount()) + count
    return sums


def read_counts(meta: Mapping[str, Any]) -> DraftCounts:
    """Return what an answer's meta_info tells of drafts; {} if the engine does not speculate."""
    rows: Iterable[Sequence[Any]] = meta.get(COUNTS, ())
    return {WeightVersion(int(version)): DraftCount(*count) for version, *count in rows}


class DraftCounter:
    """Adds up the drafts of requests, by version of weights."""

    def __init__(self) -> None:
        self._counts: DraftCounts = {}

    def add(self, counts: DraftCounts) -> None:
        """Count what was counted elsewhere."""
        self._counts = sum_counts(self._counts, counts)

    def take(self) -> DraftCounts:
        """Return the sums, and begin anew; another thread may count meanwhile."""
        counts, self._counts = self._counts, {}
        return counts


def measure_drafts(counts: DraftCounts, num_tokens: int) -> dict[str, float]:
    """Return what passes of the newest weights did, of the `num_tokens` drafts that one may check.

    {} if there were none, and without what none of them measured.
    """
    if not counts:
        return {}
    version = max(counts)
    count = counts[version]
    measured = {
        "drafts/version": float(version),
        "drafts/pass_share": count.checked / (count.checked + count.plain),
    }
    if count.checked:
        measured["drafts/acceptance"] = count.accepted / (count.checked * num_tokens)
        measured["drafts/tokens_per_pass"] = 1 + count.accepted / count.checked
    if count.rated:
        measured["drafts/gain"] = count.gain / count.rated
    return measured
