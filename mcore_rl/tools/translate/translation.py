"""Accounts for another system's options: each is in the recipe, to decide on, or unneeded.

Tables of options name those of another name, without counterpart, and without need. Arguments of
Megatron's and SGLang's command lines are handed on by their own names, as train.megatron.<field>.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf

from mcore_rl.checks.needs import check_needs
from mcore_rl.config import Config
from mcore_rl.config.recipe import make_config
from mcore_rl.config.upstream.fields import (
    DDP,
    OPTIMIZER,
    SERVER,
    TRANSFORMER,
    UpstreamClass,
    is_installed,
    read_fields,
)

V = TypeVar("V")


@dataclass(frozen=True)
class RecipeLine:
    """An option of the recipe, and the options that it was made of."""

    key: str
    value: Any
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """An option that is the user's to decide on: it has no counterpart, or more than one."""

    source: str
    value: Any
    advice: str


@dataclass(frozen=True)
class Unneeded:
    """An option that a recipe does without."""

    source: str
    value: Any
    reason: str


Found = Iterator[RecipeLine | Decision]


def says(value: Any) -> bool:
    """Return whether an option's value is more than that of one that is left out."""
    return value is not None and value is not False and value not in ("", [], {})


def _refuse_text(name: str, value: Any, default: Any) -> None:
    if isinstance(value, str) and isinstance(default, int | float):
        kind = "true or false" if isinstance(default, bool) else "a number"
        raise ValueError(
            f"{name}={value!r} is not {kind}; if the script takes it from a variable, set that"
        )


def _unquote(value: Any, default: Any) -> Any:
    """Return a list for a text that is one in quotation marks, where `default` is a list."""
    is_quoted = isinstance(default, list) and isinstance(value, str) and value.startswith("[")
    return yaml.safe_load(value) if is_quoted else value


@dataclass
class ForeignOptions:
    """Options by name; those that are read are remembered.

    given         the options that the input has
    is_whole      whether the input is a whole configuration, whose defaults nobody chose
    config_name   of the configuration whose defaults hold for what is not given, or of the program
                  that takes the options; empty: unknown
    unreadable    options whose value the input computes, and the text that computes it
    """

    given: Mapping[str, Any]
    is_whole: bool
    config_name: str = ""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def take(self, name: str, default: V) -> V:
        """Return an option, or what the other system takes if it is left out or null.

        A list in quotation marks is a list. Raises ValueError for a text where `default` is a
        number or a truth value.
        """
        self.read.add(name)
        value = self.given.get(name)
        _refuse_text(name, value, default)
        value = _unquote(value, default)
        return default if value is None else value

    def take_list(self, name: str, default: Sequence[str] = ()) -> list[str]:
        """Return an option that is a list of texts, or a single one."""
        value: Any = self.take(name, default)
        return [value] if isinstance(value, str) else list(value)

    def below(self, prefix: str, but: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the options whose names begin with `prefix`, without it, except nulls.

        Names that go on with one of `but` are neither returned nor read.
        """
        begins = tuple(f"{prefix}{name}" for name in but)
        names = [n for n in self.given if n.startswith(prefix) and not n.startswith(begins)]
        self.read.update(names)
        return {
            name.removeprefix(prefix): self.given[name]
            for name in names
            if self.given[name] is not None
        }

    def list_left(self) -> dict[str, Any]:
        """Return the options that nobody has read and somebody chose."""
        return {n: value for n, value in self.given.items() if n not in self.read and self.chose(n)}

    def chose(self, name: str) -> bool:
        """Return whether somebody chose an option; a whole configuration has all that are off."""
        return not self.is_whole or says(self.given[name])


def translate_renamed(options: ForeignOptions, table: Mapping[str, tuple[str, Any]]) -> Found:
    """Yield options that have another name in a recipe, and the same meaning.

    table   their name -> (name in a recipe, their default); a default of None: left out is left out
    """
    for theirs, (ours, default) in table.items():
        value = options.take(theirs, default)
        if value is not None:
            yield RecipeLine(ours, value, (theirs,))


def hold_longest(name: str, tokens: int, longest: int, sources: tuple[str, ...]) -> Found:
    """Yield the option `name`, the tokens of a micro-batch, that holds the longest sequence.

    tokens    what `sources` allow; the first of them is the one that is told if it is too few
    """
    yield RecipeLine(name, max(tokens, longest), sources)
    if tokens < longest:
        advice = f"a micro-batch has to hold the longest sequence: {name} is {longest} for it"
        yield Decision(sources[0], tokens, advice)


def translate_muon(
    options: ForeignOptions, name: str, ours: str, fields: Mapping[str, str]
) -> Found:
    """Yield that Muon is the optimizer, with megatron-core's options of it, where it is.

    name     their option that names the optimizer
    fields   megatron-core's field, without "muon_" -> their option
    """
    kind = options.take(name, "adam")
    if kind.removeprefix("dist_") != "muon":
        if kind == "lion":
            advice = f"set {ours}.name=lion, with Lion's decays as {ours}.beta1 and {ours}.beta2"
            yield Decision(name, kind, advice)
        elif kind != "adam":
            yield Decision(name, kind, f"{ours}.name is adam, muon or lion")
        return
    yield RecipeLine(f"{ours}.name", "muon", (name,))
    defaults: dict[str, Any] = {"extra_scale_factor": 1.0}
    table = {
        theirs: (f"{ours}.megatron.muon_{field}", defaults.get(field))
        for field, theirs in fields.items()
    }
    yield from translate_renamed(options, table)


def translate_switched(
    options: ForeignOptions, switch: str, theirs: str, ours: str, default: Any
) -> Found:
    """Yield the option `theirs` under its name in a recipe, `ours`, if `switch` is on."""
    if options.take(switch, False):
        yield RecipeLine(ours, options.take(theirs, default), (theirs, switch))


def list_differing(options: ForeignOptions, table: Mapping[str, tuple[Any, str]]) -> Found:
    """Yield what is left to the user: options that have no counterpart, unless they say nothing.

    table   their name -> (their default, advice)
    """
    for theirs, (default, advice) in table.items():
        value = options.take(theirs, default)
        if value != default:
            yield Decision(theirs, value, advice)


def longest_prefix(table: Mapping[str, str], name: str) -> str | None:
    """Return the entry of the longest key with which the name begins, or None."""
    matching = [prefix for prefix in table if name.startswith(prefix)]
    return table[max(matching, key=len)] if matching else None


PASSED = frozenset({"megatron", "ddp", "sglang"})
"""Groups of options that go to Megatron and SGLang by their own names."""
AS_HERE = "it asks for what is so here anyway"
IS_OFF = "it is off, and there is nothing of the kind here"
READ_BY_CHECKS = frozenset(
    {
        *("train.recompute", "rollout.attention_dp", "rollout.tp", "rollout.ep"),
        *("train.mtp_loss", "rollout.speculate"),
        "train.megatron.moe_token_dispatcher_type",
        *("train.optimizer.name", "critic.optimizer.name"),
        "train.optimizer.megatron.use_precision_aware_optimizer",
        "critic.optimizer.megatron.use_precision_aware_optimizer",
    }
)
"""Options of a recipe on which it depends whether an option of those groups has any effect."""


@dataclass(frozen=True)
class Translation:
    """The end of the other system's options: each is in one of three lists.

    lines       options of the recipe
    decisions   options that are left to the user
    unneeded    options that a recipe does without
    command     the command that the recipe is for: train, sft or dpo
    """

    lines: tuple[RecipeLine, ...]
    decisions: tuple[Decision, ...]
    unneeded: tuple[Unneeded, ...]
    command: str = "train"

    def explain_refusal(self) -> Decision | None:
        """Return why a recipe refuses these options together, with those it names; None: it takes
        them.

        What the advantage needs is asked for, too: a group of samples, a teacher.
        """
        try:
            config = make_config(_make_tree(self.lines))
            if self.command == "train":
                check_needs(config)
        except ValueError as error:
            told = str(error)
        else:
            return None
        named = [line for line in self.lines if line.sources and _is_in(line.key, told)]
        sources = dict.fromkeys(source for line in named for source in line.sources)
        value = named[0].value if named else None
        return Decision(", ".join(sources) or "all", value, f"a recipe refuses it: {told}")


def account(
    options: ForeignOptions,
    found: Found,
    reason_of: Callable[[str], str | None],
    command: str = "train",
) -> Translation:
    """Return a translation that has every option that was given.

    found       the recipe's options and the user's decisions that follow from `options`
    reason_of   name of an option -> why a recipe does without it; None: it does not
    command     the command that the recipe is for
    """
    items = list(found)
    items += _choose_correction([item for item in items if isinstance(item, RecipeLine)])
    lines = [item for item in items if isinstance(item, RecipeLine)]
    decisions = [item for item in items if isinstance(item, Decision)]
    refusals = _refusals(lines)
    decisions += [
        Decision(", ".join(line.sources), line.value, refusals[id(line)] or "")
        for line in lines
        if refusals[id(line)] is not None
    ]
    unneeded = []
    for name, value in [*options.list_left().items(), *options.unreadable.items()]:
        reason = reason_of(name)
        if reason is not None:
            unneeded.append(Unneeded(name, value, reason))
        elif name in options.unreadable:
            decisions.append(Decision(name, value, _advise_on_computed(value)))
        elif says(value):
            decisions.append(Decision(name, value, "this has no counterpart"))
        else:
            unneeded.append(Unneeded(name, value, IS_OFF))
    named = {name for item in (*lines, *decisions) for name in _sources(item)}
    unneeded += [
        Unneeded(name, value, AS_HERE)
        for name, value in options.given.items()
        if name in options.read - named and options.chose(name)
    ]
    kept = [line for line in lines if refusals[id(line)] is None]
    return Translation(tuple(kept), tuple(decisions), tuple(unneeded), command)


def _advise_on_computed(text: str) -> str:
    """Return what to do about a value that a script computes, or takes from the environment."""
    run = "run the script with its functions replaced (docs/switching.md)"
    names = dict.fromkeys(re.findall(r"\$\{?([A-Z][A-Z0-9_]*)\b", text))
    if not names or any(mark in text for mark in ("$(", "`")):
        return f"the script computes it: {run}"
    return f"set {' and '.join(names)} where this is run, or {run}"


def _choose_correction(lines: Sequence[RecipeLine]) -> list[RecipeLine | Decision]:
    """Return the choice of no correction, which a recipe has to name where samples are stale."""
    values = {line.key: line.value for line in lines}
    chosen = {"algorithm.correction.weight", "algorithm.correction.bypass"} & values.keys()
    if values.get("rollout.mode", "sync") == "sync" or chosen:
        return []
    advice = (
        "nothing there corrects for samples of older weights, so algorithm.correction.weight is"
        " none; token is the usual choice (docs/async.md)"
    )
    return [
        RecipeLine("algorithm.correction.weight", "none"),
        Decision("correction for stale samples", None, advice),
    ]


def _sources(item: RecipeLine | Decision) -> Sequence[str]:
    return item.sources if isinstance(item, RecipeLine) else item.source.split(", ")


def _refusals(lines: Sequence[RecipeLine]) -> dict[int, str | None]:
    """Return by id why a recipe refuses a line, which it does to no option of its own."""
    refusals: dict[int, str | None] = {}
    beside: list[RecipeLine] = []
    for line in lines:
        if line.key in READ_BY_CHECKS:
            refusals[id(line)] = _refusal(line, beside)
            beside += [line] if refusals[id(line)] is None else []
    for line in lines:
        if line.key not in READ_BY_CHECKS:
            refusals[id(line)] = _refusal(line, beside)
    return refusals


def _refusal(line: RecipeLine, beside: Sequence[RecipeLine]) -> str | None:
    """Return why an option of Megatron or SGLang is refused, or None."""
    if not PASSED & set(line.key.split(".")[:-1]):
        return None
    try:
        make_config(_make_tree([*beside, line]))
    except ValueError as error:
        return str(error)
    return None


def _make_tree(lines: Sequence[RecipeLine]) -> DictConfig:
    tree = OmegaConf.structured(Config)
    OmegaConf.set_struct(tree, False)
    for line in lines:
        OmegaConf.update(tree, line.key, line.value, force_add=True)
    return tree


def _is_in(key: str, text: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.]*\w)", text) is not None


GROUPS = (
    (TRANSFORMER, "train.megatron"),
    (OPTIMIZER, "train.optimizer.megatron"),
    (DDP, "train.ddp"),
)
SPELLED: dict[str, tuple[str, Any]] = {
    "accumulate_allreduce_grads_in_fp32": ("train.ddp.grad_reduce_in_fp32", True),
    "grad_reduce_in_bf16": ("train.ddp.grad_reduce_in_fp32", False),
    "no_check_for_nan_in_loss_and_grad": ("train.ddp.check_for_nan_in_grad", False),
    "no_rope_fusion": ("train.megatron.apply_rope_fusion", False),
    "no_bias_swiglu_fusion": ("train.megatron.bias_activation_fusion", False),
    "no_bias_gelu_fusion": ("train.megatron.bias_activation_fusion", False),
    "use_nccl_ub": ("train.ddp.nccl_ub", True),
    "use_torch_fsdp2": ("train.ddp.use_megatron_fsdp", True),
    "offload_optimizer_states": ("train.optimizer.megatron.optimizer_cpu_offload", True),
    "moe_router_force_biased": ("train.megatron.moe_router_force_load_balancing", True),
    "moe_enable_deepep": ("train.megatron.moe_flex_dispatcher_backend", "deepep"),
}
"""Flags that are not named as the field that they set, and its value."""
RENAMED = {
    "fp8_format": "train.megatron.fp8",
    "fp4_param_gather": "train.megatron.fp4_param",
    "microbatch_group_size_per_virtual_pipeline_stage": (
        "train.megatron.microbatch_group_size_per_vp_stage"
    ),
    "fp4_format": "train.megatron.fp4",
    "ddp_bucket_size": "train.ddp.bucket_size",
    "ddp_pad_buckets_for_high_nccl_busbw": "train.ddp.pad_buckets_for_high_nccl_busbw",
    "ddp_average_in_collective": "train.ddp.average_in_collective",
    "ddp_reduce_scatter_with_fp32_accumulation": (
        "train.ddp.reduce_scatter_with_fp32_accumulation"
    ),
    "moe_router_bias_update_rate": "train.router_bias_rate",
}


def translate_flags(options: ForeignOptions, reason_of: Callable[[str], str | None]) -> Found:
    """Yield the options that nobody has read, where they are fields of Megatron's or SGLang's.

    reason_of   name of an option -> why a recipe does without it; None: it does not
    """
    yield from _balance(options)
    for flag in list(options.list_left()):
        if reason_of(flag) is not None:
            continue
        value = options.given[flag]
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--sglang-"):
            options.read.add(flag)
            yield _translate_engine_flag(name.removeprefix("sglang_"), value, flag)
            continue
        line = _translate_trainer_flag(name, value, flag)
        if line is not None:
            options.read.add(flag)
            yield line


def _balance(options: ForeignOptions) -> Found:
    """Yield the coefficients of the losses that balance experts, which are named by their kind."""
    kinds = options.take_list("--moe-router-load-balancing-type", ["aux_loss"])
    coefs: Any = options.take("--moe-aux-loss-coeff", 0.0)
    coefs = coefs if isinstance(coefs, list) else [coefs] * len(kinds)
    names = {"aux_loss": "router_aux_loss_coef", "seq_aux_loss": "router_sequence_aux_loss_coef"}
    sources = ("--moe-aux-loss-coeff", "--moe-router-load-balancing-type")
    if not options.given.keys() & set(sources):
        return
    for kind, coef in zip(kinds, coefs, strict=False):
        if kind in names:
            yield RecipeLine(f"train.{names[kind]}", coef, sources)
        elif kind != "none":
            advice = "experts are balanced by train.router_aux_loss_coef and"
            advice += " train.router_sequence_aux_loss_coef, or by train.router_bias_rate"
            yield Decision("--moe-router-load-balancing-type", kind, advice)


def _translate_engine_flag(name: str, value: Any, flag: str) -> RecipeLine:
    field = read_fields(SERVER).get(name) if is_installed(SERVER) else None
    is_list = field is not None and type_of(field.kind).startswith("List[")
    return RecipeLine(
        f"rollout.sglang.{name}",
        [value] if is_list and not isinstance(value, list) else value,
        (flag,),
    )


def type_of(kind: Any) -> str:
    text = ast.unparse(kind)
    return text.removeprefix("Optional[").replace("list[", "List[")


def _translate_trainer_flag(name: str, value: Any, flag: str) -> RecipeLine | None:
    if name in SPELLED:
        key, meant = SPELLED[name]
        return RecipeLine(key, meant, (flag,))
    if name in RENAMED:
        return RecipeLine(RENAMED[name], value, (flag,))
    negated = name.removeprefix("no_").removeprefix("disable_")
    for upstream, group in GROUPS:
        if is_field(upstream, name):
            return RecipeLine(f"{group}.{name}", value, (flag,))
        if negated != name and value is True and is_field(upstream, negated):
            return RecipeLine(f"{group}.{negated}", False, (flag,))
    return None


def is_field(upstream: UpstreamClass, name: str) -> bool:
    """Return whether the installed class has a field of this name."""
    return is_installed(upstream) and name in read_fields(upstream)
