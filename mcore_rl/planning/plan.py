"""`mcore-rl plan`: prints the memory of a recipe's ranks and the traffic of its weight sync."""

import json
import sys
from dataclasses import asdict

from rich.console import Console

from mcore_rl.algo.requirements import check_algorithm
from mcore_rl.config import Config
from mcore_rl.config.recipe import require
from mcore_rl.planning.checks import check_engines, check_sizes
from mcore_rl.planning.deployment import make_deployment
from mcore_rl.planning.memory import predict_memory
from mcore_rl.planning.moments import read_models
from mcore_rl.planning.node_needs import explain_servers
from mcore_rl.planning.rank_memory import as_json as memory_as_json
from mcore_rl.planning.store_memory import explain_stores, store_bytes, store_nodes
from mcore_rl.planning.sync import comparison_table, flows_table, predict_sync
from mcore_rl.planning.tables import explain, memory_table, verdict


def print_plan(config: Config, as_json: bool = False) -> bool:
    """Print the plan of a recipe and return whether it fits its GPUs.

    Raises ValueError naming an option that is missing, or two sizes that do not divide.
    """
    require(config, "model.path")
    check_algorithm(config)
    models = read_models(config)
    check_sizes(config, models.policy)
    check_engines(config, models.policy)
    deployment = make_deployment(config, models.policy)
    summary, traffic = predict_sync(config, deployment)
    ranks = predict_memory(config, models)
    fits, sentence = verdict(config, models, ranks)
    if as_json:
        memory = {
            "memory": memory_as_json(ranks),
            "fits": fits,
            "verdict": sentence,
            "explained": explain(config, ranks),
            "store_bytes": store_bytes(config, models.policy),
            "store_nodes": store_nodes(config),
            "servers": explain_servers(config.sandbox, config.search),
        }
        print(json.dumps(asdict(summary) | memory))
        return fits
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(flows_table(config, deployment, traffic, summary))
    console.print(comparison_table(summary))
    console.print(memory_table(config.plan, ranks))
    stores = explain_stores(config, models.policy)
    servers = explain_servers(config.sandbox, config.search)
    for line in filter(None, (*explain(config, ranks), stores, servers, sentence)):
        console.print(line, soft_wrap=True, highlight=False)
    return fits
