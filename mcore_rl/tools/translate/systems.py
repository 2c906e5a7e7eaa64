"""Names the systems whose options are converted, and writes the recipe in YAML.

What is left to the user stands at the top of the recipe.
"""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from mcore_rl.config import DataConfig, RolloutConfig
from mcore_rl.tools.translate.hydra import read_options
from mcore_rl.tools.translate.nemo_rl import read_nemo_rl, translate_nemo_rl
from mcore_rl.tools.translate.slime import translate_slime
from mcore_rl.tools.translate.slime_script import read_slime
from mcore_rl.tools.translate.translation import (
    Decision,
    ForeignOptions,
    RecipeLine,
    Translation,
)
from mcore_rl.tools.translate.tuning import name_for_command
from mcore_rl.tools.translate.verl import translate_verl

WIDTH = 120


ADAM = "train.optimizer.megatron"
PLAIN_ADAM = {
    "use_precision_aware_optimizer": False,
    "exp_avg_dtype": "float32",
    "exp_avg_sq_dtype": "float32",
}
"""Options of Megatron's optimizer that the files of recipes/cluster/ set, and their defaults."""
SMALL_ADAM = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bfloat16",
    "exp_avg_sq_dtype": "bfloat16",
}
"""The values that they set."""
OFFLOAD = tuple(
    f"{ADAM}.{name}="
    for name in (
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
        "overlap_cpu_optimizer_d2h_h2d",
        "use_torch_optimizer_for_cpu_offload",
    )
)
"""How a refusal of an optimizer in host memory begins; the first is of the one that asks for it."""
OVERLAP = "train.ddp.overlap_grad_reduce"
IN_PLACE = "rollout.stage_weights"
OVERWRITTEN = (
    "a sync writes over the weights that engines serve, as there; rollout.stage_weights=true"
    " receives them while engines decode, and takes their memory twice"
)


def complete(translation: Translation) -> Translation:
    """Return a translation that also says for which GPUs it is, and why a recipe refuses it.

    A file of recipes/cluster/ must not change how the other system trains, so what it would change
    is written out, except where that system has no room for its optimizer on the GPUs.
    """
    translation = _keep_optimizer_on_gpus(translation)
    kept = _keep_unlike_cluster(translation.lines) if translation.command == "train" else []
    kept += _suit_factors(translation.lines)
    further = [_name_gpus(translation.command)]
    if any(line.key == IN_PLACE for line in kept):
        further.append(Decision("weights of engines", None, OVERWRITTEN))
    if (refusal := translation.explain_refusal()) is not None:
        further.insert(0, refusal)
    completed = replace(
        translation,
        lines=(*translation.lines, *kept),
        decisions=(*further, *translation.decisions),
    )
    return name_for_command(completed)


def _name_gpus(command: str) -> Decision:
    advice = "hosts of eight H100 with 80 GiB each are assumed; "
    if command == "train":
        advice += "`mcore-rl plan cluster=h200` plans for others, which recipes/cluster/ has"
    else:
        advice += f"`mcore-rl {command} cluster=h200` is for others, which recipes/cluster/ has,"
        advice += " and refuses at its start what does not fit"
    return Decision("kind of GPU", None, advice)


def _keep_unlike_cluster(lines: Sequence[RecipeLine]) -> list[RecipeLine]:
    """Return the defaults that a file of recipes/cluster/ would change, and those that the other
    system's engines would not have the memory for.
    """
    keys = {line.key for line in lines}
    kept = [
        RecipeLine(f"{ADAM}.{name}", value)
        for name, value in PLAIN_ADAM.items()
        if f"{ADAM}.{name}" not in keys
    ]
    if IN_PLACE not in keys:
        kept.append(RecipeLine(IN_PLACE, False))
    return kept + _hold_longest(lines)


def _suit_factors(lines: Sequence[RecipeLine]) -> list[RecipeLine]:
    """Return what recipes/cluster/ sets and a recipe with factors refuses."""
    keys = {line.key for line in lines}
    if "train.lora.rank" not in keys or OVERLAP in keys:
        return []
    return [RecipeLine(OVERLAP, False)]


def _hold_longest(lines: Sequence[RecipeLine]) -> list[RecipeLine]:
    """Return the KV cache that holds the longest sequence, where the default does not."""
    values = {line.key: line.value for line in lines}
    longest = values.get("data.max_prompt_len", DataConfig().max_prompt_len)
    longest += values.get("rollout.max_response_len", RolloutConfig().max_response_len)
    key = "rollout.kv_cache_len"
    if key in values or longest <= RolloutConfig().kv_cache_len:
        return []
    return [RecipeLine(key, longest)]


def _keep_optimizer_on_gpus(translation: Translation) -> Translation:
    """Return a translation with moments in bfloat16 if the optimizer was to lie in host memory."""
    told = [item for item in translation.decisions if item.advice.startswith(OFFLOAD)]
    asked = [item.source for item in told if item.advice.startswith(f"{OFFLOAD[0]}true")]
    if not asked:
        return translation
    advice = f"the optimizer stays on the GPUs, with moments in bfloat16 ({ADAM}), for it to fit"
    own = {f"{ADAM}.{name}": value for name, value in SMALL_ADAM.items()}
    sources = [*asked, *(s for line in translation.lines if line.key in own for s in line.sources)]
    small = [RecipeLine(key, value, tuple(sources)) for key, value in own.items()]
    others = [line for line in translation.lines if line.key not in own]
    decisions = [replace(d, advice=advice) if d in told else d for d in translation.decisions]
    return replace(translation, lines=(*others, *small), decisions=tuple(decisions))


def _choose_cluster(lines: Sequence[RecipeLine]) -> str:
    """Return the file of recipes/cluster/ that a recipe begins with."""
    is_colocated = any(line.key == "cluster.colocated" and line.value for line in lines)
    return "h100_colocated" if is_colocated else "h100"


def write_recipe(translation: Translation, title: str) -> str:
    """Return the recipe's text; `title` is its first line, as `mcore-rl --help` lists it."""
    cluster = _choose_cluster(translation.lines)
    head = [f"# {title}", "#"]
    for decision in translation.decisions:
        value = "not given" if decision.value is None else _flow(decision.value)
        head += _comment(f"To decide: {decision.source} ({value}): {decision.advice}")
    head += _comment(
        "Every option that was given is in this file, under `To decide`, or among those that the"
        " command has listed as unneeded."
    )
    head += ["defaults:", "  - schema", f"  - cluster: {cluster}", "  - _self_"]
    return "\n".join([*head, *_body(_tree(translation.lines), 0)]) + "\n"


def _tree(lines: Sequence[RecipeLine]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for line in lines:
        *groups, name = line.key.split(".")
        below = tree
        for group in groups:
            below = below.setdefault(group, {})
        below[name] = line
    return tree


def _body(tree: Mapping[str, Any], depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, value in tree.items():
        if isinstance(value, RecipeLine):
            sources = f" # {', '.join(value.sources)}" if value.sources else ""
            yield f"{indent}{name}: {_flow(value.value)}{sources}"
        else:
            yield f"{indent}{name}:"
            yield from _body(value, depth + 1)


def _flow(value: Any) -> str:
    """Return a value on one line of YAML, a float so that it is read as one again."""
    if isinstance(value, float):
        # YAML 1.1 reads 1e-06 as text: it wants a point.
        mantissa, exponent, power = repr(value).partition("e")
        return f"{mantissa}{'' if '.' in mantissa else '.0'}{exponent}{power}"
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="#   ")


@dataclass(frozen=True)
class TranslatedSystem:
    """Another system for RL post-training.

    read        arguments of `mcore-rl translate` -> its options
    translate   its options -> those of a recipe
    """

    title: str
    read: Callable[[Sequence[str]], ForeignOptions]
    translate: Callable[[ForeignOptions], Translation]


SYSTEMS: Mapping[str, TranslatedSystem] = {
    "verl": TranslatedSystem("verl", read_options, translate_verl),
    "slime": TranslatedSystem("slime", read_slime, translate_slime),
    "nemo-rl": TranslatedSystem("NeMo-RL", read_nemo_rl, translate_nemo_rl),
}
