"""Converts where verl's engines run, and how its sampling and training alternate, into options.

main_ppo              in turns; with trainer.v1, engines on nodes of their own go on sampling
one_step_off_policy   the next step is sampled while this one is trained
fully_async_policy    engines never wait for the trainer
"""

import math

from mcore_rl.tools.translate.translation import (
    Decision,
    ForeignOptions,
    Found,
    RecipeLine,
    list_differing,
)
from mcore_rl.tools.translate.verl_shared import (
    FULLY_ASYNC,
    ROLLOUT,
    is_fully_async,
    is_one_step_off,
    take_prompts,
    take_shared,
)

ASYNCHRONOUS = "trainer.v1.trainer_mode"
STALENESS = f"{FULLY_ASYNC}staleness_threshold"
LENDS = "GPUs of the trainer are lent to no engines"


def translate_placement(options: ForeignOptions, ranks: int) -> Found:
    """Yield the number of engines of `ranks` GPUs, and whether they share those of the trainer."""
    nodes = take_shared(options, "trainer.nnodes")
    gpus = take_shared(options, "trainer.n_gpus_per_node")
    if is_fully_async(options) or is_one_step_off(options):
        # The two programs may give each node's GPUs to both, so that nodes do not add up.
        names = ("rollout.nnodes", "rollout.n_gpus_per_node")
        own = options.take(names[0], 1) * options.take(names[1], 8)
        yield RecipeLine("rollout.engines", max(own // ranks, 1), names)
        options.take("actor_rollout_ref.hybrid_engine", False)
        return
    apart = options.take(f"{ROLLOUT}.nnodes", 0)
    if apart:
        per_node = options.take(f"{ROLLOUT}.n_gpus_per_node", gpus)
        sources = (f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node")
        yield RecipeLine("rollout.engines", max(apart * per_node // ranks, 1), sources)
        if options.take(ASYNCHRONOUS, "sync") != "separate_async":
            advice = "rollout.mode is sync, one_step_off or async here (docs/async.md)"
            yield Decision(f"{ROLLOUT}.nnodes", apart, advice)
        yield from _several_nodes(nodes + apart)
        return
    sources = ("trainer.nnodes", "trainer.n_gpus_per_node", f"{ROLLOUT}.tensor_model_parallel_size")
    yield RecipeLine("rollout.engines", max(nodes * gpus // ranks, 1), sources)
    if take_shared(options, "actor_rollout_ref.hybrid_engine"):
        yield RecipeLine("cluster.colocated", True, ("actor_rollout_ref.hybrid_engine",))
        # A recipe with engines on the trainer's GPUs has to have these.
        yield RecipeLine("rollout.stage_weights", False)
        yield RecipeLine("rollout.restarts", 0)
    yield from _several_nodes(nodes)


def _several_nodes(nodes: int) -> Found:
    if nodes > 1:
        advice = (
            "`mcore-rl submit` finds it from the ranks of the recipe (docs/launch.md); on a Ray"
        )
        advice += " of your own set cluster.address and cluster.num_nodes"
        yield Decision("trainer.nnodes", nodes, advice)


def translate_mode(options: ForeignOptions) -> Found:
    """Yield whether engines wait for the trainer, and how old samples may be."""
    if is_fully_async(options):
        yield from _fully_async(options)
        return
    if is_one_step_off(options):
        yield RecipeLine("rollout.mode", "one_step_off")
        return
    mode = options.take(ASYNCHRONOUS, "sync")
    if mode == "sync":
        return
    if mode != "separate_async" or not options.take(f"{ROLLOUT}.nnodes", 0):
        advice = "engines on the trainer's GPUs take turns with it: rollout.mode is sync"
        yield Decision(ASYNCHRONOUS, mode, advice)
        return
    yield RecipeLine("rollout.mode", "async", (ASYNCHRONOUS,))
    yield RecipeLine("rollout.partial", "continue", (ASYNCHRONOUS,))
    oldest = "trainer.v1.sampler.max_off_policy_threshold"
    strategy = "trainer.v1.sampler.max_off_policy_strategy"
    if oldest in options.given and options.given[oldest] is None:
        yield RecipeLine("rollout.stale", "correct", (oldest,))
    else:
        # verl counts the versions that a sample spans, the newest included.
        versions = options.take(oldest, 8)
        yield RecipeLine("rollout.max_staleness", max(versions - 1, 1), (oldest,))
        yield RecipeLine("rollout.stale", options.take(strategy, "drop"), (strategy,))
    lends = "trainer.v1.separate_async.hybrid_rollout.enable_switch"
    if options.take(lends, False):
        yield Decision(lends, True, LENDS)


ASYNC_WITHOUT_COUNTERPART = {
    f"{FULLY_ASYNC}use_trainer_do_validate": (False, LENDS),
    f"{FULLY_ASYNC}use_dynamic_resource_scheduling": (False, LENDS),
}


def _fully_async(options: ForeignOptions) -> Found:
    """Yield the mode of the fully asynchronous program, whose staleness is a share of a step."""
    share = options.take(STALENESS, 0.1)
    partial = f"{FULLY_ASYNC}partial_rollout"
    continues = options.take(partial, True)
    if share > 0:
        yield RecipeLine("rollout.mode", "async", (STALENESS,))
        yield RecipeLine("rollout.partial", "continue" if continues else "wait", (partial,))
        yield RecipeLine("rollout.max_staleness", math.ceil(share), (STALENESS,))
    else:
        yield RecipeLine("rollout.mode", "sync", (STALENESS,))
    if share % 1:
        advice = f"rollout.max_staleness counts whole versions, here {math.ceil(share)}: engines"
        advice += " may begin so many steps ahead; rollout.max_in_flight bounds what they begin"
        yield Decision(STALENESS, share, advice)
    yield from list_differing(options, ASYNC_WITHOUT_COUNTERPART)


def translate_samples(options: ForeignOptions) -> Found:
    """Yield the steps of the fully asynchronous program, which counts the prompts of a run."""
    name = "rollout.total_rollout_steps"
    prompts, sources = take_prompts(options)
    total = options.take(name, 100)
    yield RecipeLine("run.steps", max(total // prompts, 1), (name, *sources))
