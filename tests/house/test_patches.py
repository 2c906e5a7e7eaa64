"""Every name of other packages that the code replaces is registered, and the registry is true."""

import ast
import importlib.util
import re
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
import torch

from mcore_rl.config.recipe import load_recipe
from mcore_rl.cpu.kernel_patches import KERNEL_PATCHES
from mcore_rl.cpu.megatron_patches import PATCHES as MEGATRON_PATCHES
from mcore_rl.cpu.megatron_patches import WITHOUT_TRANSFORMER_ENGINE
from mcore_rl.device.replaced import PATCHES, document, megatron_on_cpu, on_gpus, sglang_on_cpu
from mcore_rl.device.replaced.entry import Patch, Scope, Times
from mcore_rl.device.sglang_setup import STANDINS_DIR
from tests.support.foreign_names import Hit, find_all, find_replaced
from tests.support.policy import ROOT

NOT_REPLACED = {
    ("mcore_rl.cpu.kernels.layers", "_tables"): "an attribute of a tensor of ours",
    ("mcore_rl.weight_sync.receiver", "keep_on_calling_thread"): "an attribute of a tensor of ours",
    ("sglang_on_cpu.native_forward", "NativeForward._fill_layers"): "fields of a C structure",
    ("sglang_on_cpu.native_forward", "NativeForward._make_space"): "fields of a C structure",
    ("mcore_rl.tools.completion", "answer_shell"): "an attribute that argcomplete documents",
    ("mcore_rl.device.probes", "release_and_resume"): "a setting that its package documents",
    ("mcore_rl.services.sandbox.notebook", "run_cell"): "an entry under a name of our own",
    ("mcore_rl.train.sparse.attention", "train_indexers"): "an attribute that megatron-core reads",
    ("mcore_rl.train.mtp.layers", "make_mtp_block"): "a field of a spec of ours",
    ("mcore_rl.train.mtp.layers", "_adapt"): "a field of a copy of a spec",
    ("mcore_rl.process.user_files", ""): "a finder for modules under a name of our own",
}
"""Assignments that look like patches: (module, function) -> what they set."""
BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
NOT_IN_ITS_FILE = {
    "torch.nn.Module.rotary_pos_emb": "several classes of transformers have it",
    "megatron.core.optimizer.OptimizerConfig.__post_init__": "the class comes from another file",
    f"{BACKEND}.get_cpu_graph_seq_len_fill_value": "its class lacks it, which is the fault",
}
MANY = 40


def registered(hit: Hit) -> list[tuple[Patch, str]]:
    """Return the entries, with the names in them, that a place in the code may belong to."""
    return [
        (patch, name)
        for patch in PATCHES
        if tuple(patch.where.split(":")) == hit.where
        for name in patch.names
        if hit.is_of(name)
    ]


def test_every_replaced_name_is_registered() -> None:
    hits = [hit for hit in find_all() if hit.where not in NOT_REPLACED]
    missing = [
        f"{hit.module}:{hit.line} {hit.function} replaces {hit.name}"
        for hit in hits
        if not registered(hit)
    ]
    assert len(hits) > MANY
    assert not missing, "register them in mcore_rl/device/replaced:\n" + "\n".join(missing)


def test_every_registered_name_is_still_replaced() -> None:
    found = {(patch.where, name) for hit in find_all() for patch, name in registered(hit)}
    wanted = {(patch.where, name) for patch in PATCHES for name in patch.names}
    assert wanted == found, f"no assignment any more: {sorted(wanted - found)}"


def test_every_exemption_is_still_one() -> None:
    assert not NOT_REPLACED.keys() - {hit.where for hit in find_all()}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\ndef f():\n    torch.compile = None", "torch.compile"),
        ("def f():\n    from a.b import C\n    C.x, C.y = 1, 2", "a.b.C.x a.b.C.y"),
        ("import a.b as m\nsetattr(m, 'x', 1)", "a.b.x"),
        ("import a\nfor n in 'xy':\n    setattr(a, n, 1)", "a.*"),
        ("def f(owner, n):\n    setattr(owner, n, 1)", "?.*"),
        ("from importlib import import_module\nm: object = import_module('a.b')\nm.x = 1", "a.b.x"),
        ("import a\nm = a.b\nm.C.x = lambda: 0", "a.b.C.x"),
        ("import sys\nsys.modules['a'] = None", "sys.modules.a"),
        ("from a import T\nT.models.update({})", "a.T.models"),
        ("from a import T\nT.TABLE['x'] = 1", "a.T.TABLE"),
        ("from a import R\nR.register('x', 1)", "a.R"),
        ("import a\nvars(a)['_t'].x = 1", "a._t.x"),
        ("import a\ndel a.x", "a.x"),
        ("from functools import partial\ndef g(): ...\ndef f(o):\n    o.x = partial(g, o)", "?.x"),
        ("from mcore_rl.a import Router\ndef f(layer):\n    layer.router = Router", "?.router"),
        ("from mcore_rl.a import Head\ndef f(chunk):\n    chunk.head = Head(1)", "?.head"),
        ("from a import A, B\nfor c in (A, B):\n    c.f = max(c.f)", "a.A.f a.B.f"),
        (
            "import a\nfor c, n in ((a.A, 'f'), (a.B, 'g')):\n    setattr(c, n, 1)",
            "a.A.* a.B.* ?.*",
        ),
        (
            "def wrap(g):\n    def new(): ...\n    return new\ndef f(m):\n    m.x = wrap(1)",
            "?.x",
        ),
        ("import a.b as m\nvars(m).update(x=1)", "a.b.*"),
        ("import a.b as m\nvars(m)['x'] = 1", "a.b.x"),
        ("from unittest import mock\nmock.patch('a.b.x', 1).start()", "a.b.x"),
        ("from unittest.mock import patch\nimport a\npatch.object(a.B, 'x', 1).start()", "a.B.x"),
        ("import sys\nNAME = 'a'\nsys.modules[NAME] = None", "sys.modules.a"),
        ("import importlib\nNAME = 'a.b'\nimportlib.import_module(NAME).x = 1", "a.b.x"),
        ("from a import A\ntype.__setattr__(A, 'x', 1)", "a.A.x"),
        (
            "def f(layer, made):\n    a = layer.submodules.a.submodules\n    a.b, a.c = made",
            "?.b ?.c",
        ),
    ],
)
def test_ways_to_replace_a_name_are_found(source: str, expected: str, tmp_path: Path) -> None:
    assert {hit.name for hit in find_in(source, tmp_path)} == set(expected.split())


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nsys.argv = []",
        "import os\nos.environ['A'] = '1'",
        "import mcore_rl.a as m\nm.x = 1",
        "class A:\n    def f(self, b):\n        self.x = b.y = 1",
        "import ctypes\ndef f(library):\n    library.g.restype = ctypes.c_int",
        "import a\ndef f(o):\n    o = a.Options()\n    o.timeout = 1",
        "def new():\n    return 1\ndef f(options):\n    options.x = new()",
        "import sys\ndef f(module):\n    sys.modules[module.__name__] = module",
    ],
)
def test_other_assignments_are_none(source: str, tmp_path: Path) -> None:
    assert find_in(source, tmp_path) == []


def test_every_replaced_name_is_in_the_source_of_its_package() -> None:
    """A name that upstream renamed would be set for nobody."""
    missing = []
    for name in {name for patch in PATCHES for name in patch.names} - NOT_IN_ITS_FILE.keys():
        file = source_of(name)
        if file is None or name.rpartition(".")[2] in words_of(file):
            continue
        if name.startswith("torch."):  # much of it is compiled
            assert callable(attrgetter(name.removeprefix("torch."))(torch)), name
        else:
            missing.append(f"{name}: not in {file}")
    assert not missing, "\n".join(missing)


def test_what_runs_in_every_step_on_a_gpu_is_measured_there_or_has_to_be_asked_for() -> None:
    on_gpu = [patch for patch in PATCHES if patch.scope is not Scope.CPU]
    assert not any(patch.runs is Times.NEVER for patch in on_gpu)
    in_steps = [patch for patch in on_gpu if patch.runs is Times.IN_STEPS]
    assert in_steps
    for patch in in_steps:
        assert patch.measured or patch.opt_in or patch.required, patch.where
        assert patch.switch, f"{patch.where}: what switches it off?"


def test_patches_of_a_cpu_say_what_a_gpu_has_there() -> None:
    for patch in PATCHES:
        assert bool(patch.on_gpu) == (patch.scope is Scope.CPU), patch.where


def test_the_rule_of_admission_is_off_on_gpus_unless_a_recipe_asks() -> None:
    """tests/rollout/test_shared_prompts.py has what None means."""
    assert load_recipe("qwen3_30b_a3b_grpo_8", []).rollout.share_prompts is None


def test_options_that_switch_patches_off_exist() -> None:
    options = re.findall(r"\b([a-z]+\.[a-z_]+=[a-z]+)", " ".join(p.switch for p in PATCHES))
    assert {"rollout.share_prompts=false", "rollout.compiled=false"} <= set(options)
    load_recipe("tiny_moe_grpo", sorted(set(options)))


def test_tests_that_are_named_exist() -> None:
    for patch in PATCHES:
        file, _, name = patch.test.partition("::")
        if patch.test:
            defined = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text()))
                       if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}  # fmt: skip
            assert name.partition("[")[0] in defined, patch.test
    untested = [patch.where for patch in PATCHES if patch.scope is Scope.CPU and not patch.test]
    assert not untested


def test_patches_of_a_cpu_are_registered_in_the_order_in_which_they_are_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [patch.__name__ for patch in (*MEGATRON_PATCHES, *KERNEL_PATCHES)]
    called = ["leave_compiler_out" if name == "run_eagerly" else name for name in names]
    assert [patch.function for patch in megatron_on_cpu.PATCHES] == called
    monkeypatch.syspath_prepend(STANDINS_DIR)
    import sglang_on_cpu as applied  # pyright: ignore[reportMissingImports]

    names = [patch.__name__ for patch in applied.PATCHES]
    assert [patch.function for patch in sglang_on_cpu.PATCHES][: len(names)] == names


def test_the_patches_that_checks_of_gpus_apply_are_named() -> None:
    names = tuple(patch.__name__ for patch in WITHOUT_TRANSFORMER_ENGINE)
    assert names == document.APPLIED_BY_CHECKS


def test_the_document_is_that_of_the_registry() -> None:
    written = (ROOT / "docs/patches.md").read_text()
    assert written == document.make_document(), "run `make patches`"


def find_in(source: str, folder: Path) -> list[Hit]:
    file = folder / "module.py"
    file.write_text(source)
    return find_replaced(file)


def source_of(name: str) -> Path | None:
    """Return the longest module of a dotted name; None for what is built in or not installed."""
    parts = name.split(".")
    spec = importlib.util.find_spec(parts[0])
    if spec is None or not spec.submodule_search_locations:
        return None
    file: Path = Path(next(iter(spec.submodule_search_locations)))
    found = None
    for number, part in enumerate(parts):
        file = file if number == 0 else file / part
        for candidate in (file / "__init__.py", file.with_suffix(".py")):
            found = candidate if candidate.is_file() else found
    return found


def words_of(file: Path) -> set[str]:
    return set(re.findall(r"\w+", file.read_text()))


def test_a_name_that_upstream_does_not_have_is_noticed() -> None:
    known = next(patch for patch in on_gpus.TRAINING if patch.function == "use_adam_in_parts")
    renamed = replace(known, names=("megatron.core.optimizer.distrib_optimizer.AdamOfNobody",))
    file = source_of(renamed.names[0])
    assert file is not None and file.name == "distrib_optimizer.py"
    assert "AdamOfNobody" not in words_of(file) and "Adam" in words_of(file)
