"""House rules that no linter knows: sizes, docstrings, who may name CUDA, pins that agree."""

import ast
import re
import tomllib
from collections import defaultdict
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.policy import ROOT, parse, python_files, read, tracked

FILE_LINES = 500
FUNCTION_LINES = 50
DEVICE = ("mcore_rl/device/", "mcore_rl/cpu/")
PURE = ("algo", "batches", "data", "rewards", "tasks", "weights")
DEVICE_WORDS = re.compile(r"\btorch\.cuda\b|\bnccl\b|\btransformer_engine\b|\bapex\b")
LEANING = re.compile(r'("""|# )(Of|What|Likewise)\b')
IN_OUT = re.compile(r"\bin(?: \(.*?\))?[,;:.] .*\bout\b")
"""A module docstring without a verb: "Prompts in, samples out."."""
BRITISH = re.compile(
    r"\b\w*(quanti|normali|optimi|initiali|seriali|organi|recogni|synchroni)s(e|ed|es|ing|ation)\b"
    r"|\b\w*(havio[u]r|ono[u]r|olo[u]r|ighbo[u]r)\w*|\btoward[s]\b"
    r"|(?<!\.)\b\w*(cance|channe|labe|leve|mode|signa|tota|trave|tunne)ll(ed|ing|er|ers)\b",
    re.IGNORECASE,
)
REPLACED = {"megatron-core", "ray", "sglang", "transformer-engine", "transformers"}
AS_SGLANG_ASKS = {
    *("apache-tvm-ffi", "openai", "openai-harmony", "sentencepiece", "soundfile", "tokenizers"),
}
FORMER_NAME = "dequantise"
FORMER_NAME_IN = (
    "CHANGELOG.md",
    "checkpoint_tools/cli.py",
    "docs/checkpoints.md",
    "tests/checkpoint_tools/test_cli.py",
    "tests/house/test_house.py",
)
"""The former name of a command, which users may still type, and the files that may write it."""
# Written so that no pattern matches its own source.
LOCAL_WORDS = re.compile(
    r"\.\./share[d]|/wor[k]/|/tmp/[w]/|\bissue[ ]#?\d|\bhelper[ ][A-G]\b|\b(TOD[O]|FIXM[E])\b"
)


def test_files_and_functions_stay_small() -> None:
    long = []
    for path in python_files():
        num_lines = len(read(path).splitlines())
        if num_lines > FILE_LINES:
            long.append(f"{path}: {num_lines} lines, at most {FILE_LINES}")
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > FUNCTION_LINES:
                    long.append(f"{path}:{node.lineno} {node.name}: {num_lines} lines")
    assert not long, "\n".join(long)


def test_docstrings_and_comments_begin_like_sentences() -> None:
    """None begins with "Of", "What" or "Likewise", which lean on a sentence that is not there."""
    found = [
        f"{path}:{number}: {line.strip()}"
        for path in python_files()
        for number, line in enumerate(read(path).splitlines(), start=1)
        if LEANING.search(line)
    ]
    assert not found, "\n".join(found)


def test_module_docstrings_say_what_flows_in_and_out_with_verbs() -> None:
    found = [
        f"{path}: {text}"
        for path in python_files("mcore_rl", "checkpoint_tools", "launch", "benchmarks")
        for paragraph in (ast.get_docstring(parse(path)) or "").split("\n\n")
        if IN_OUT.search(text := " ".join(paragraph.split()))
    ]
    assert IN_OUT.search("A user's file in (algorithm.path), its losses registered out.")
    assert not IN_OUT.search("Turns prompts into samples, and leaves out those without a token.")
    assert not found, "\n".join(found)


def test_spelling_is_american() -> None:
    paths = tracked(".py", ".md", ".yaml")
    words = {path: set(re.findall(r"\w+", read(path))) for path in paths}
    british = {word for word in set().union(*words.values()) if BRITISH.search(word)}
    found = [
        f"{path}:{number}: {match.group()}"
        for path in paths
        if words[path] & british
        for number, line in enumerate(read(path).splitlines(), start=1)
        for match in BRITISH.finditer(line)
        if not (match.group() == FORMER_NAME and path.as_posix() in FORMER_NAME_IN)
        and not match.group().isupper()  # a constant of somebody else's, such as a job's state
    ]
    assert FORMER_NAME in british
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "is_british"),
    [
        ("label" + "led", True),
        ("a neighbo" + "ur", True),
        ("toward" + "s", True),
        ("task.cancel" + "led()", False),
        ("controlled, called, labeled", False),
    ],
)
def test_british_spelling_is_found(line: str, is_british: bool) -> None:
    assert bool(BRITISH.search(line)) == is_british


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path)
        for path in python_files()
        if parse(path).body and not ast.get_docstring(parse(path))
    ]
    assert not silent, f"no module docstring: {silent}"


def test_errors_are_told_by_one_function() -> None:
    """Others print nothing for an error without a text, such as asyncio's TimeoutError."""
    own = re.compile(r"type\((\w+)\)\.__name__\}: \{\1\b|raise TimeoutError(\(\)|$)", re.MULTILINE)
    paths = [str(path) for path in python_files() if str(path).startswith(("mcore_rl", "launch"))]
    found = [path for path in paths if own.search(read(Path(path)))]
    assert not found, f"use mcore_rl.process.errors.describe_error in {found}"
    assert own.search('f"{type(error).__name__}: {error}"') and own.search("raise TimeoutError()")


def test_no_two_public_classes_share_a_name() -> None:
    """Stand-ins keep the names of what they stand for."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in python_files("mcore_rl", "checkpoint_tools", "launch"):
        if "standins" in path.parts:
            continue
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    assert len(places) > 100
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_only_device_names_cuda_libraries() -> None:
    found = [
        f"{path}:{line}: {word}"
        for path in python_files("mcore_rl", "checkpoint_tools", "launch", "benchmarks")
        if not path.as_posix().startswith(DEVICE) and DEVICE_WORDS.search(read(path))
        for line, word in device_words(parse(path))
    ]
    assert not found, "only mcore_rl.device may name these:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import transformer_engine.pytorch as te",
        "from apex import x",
        "torch.cuda.synchronize()",
        "f('nccl')",
    ],
)
def test_the_search_for_cuda_libraries_finds_them(source: str) -> None:
    assert device_words(ast.parse(source))
    assert not device_words(ast.parse(f"{source!r}\nspec(use_transformer_engine=True)"))


def test_pure_layers_do_not_communicate() -> None:
    modules = [
        path for path in python_files("mcore_rl") if len(path.parts) > 2 and path.parts[1] in PURE
    ]
    found = [
        f"{path}:{node.lineno}"
        for path in modules
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute | ast.ImportFrom | ast.Import)
        if re.search(r"\btorch(\.|.* import )distributed\b", ast.unparse(node))
    ]
    assert modules
    assert not found, f"torch.distributed in a pure layer: {found}"


def test_no_text_leans_on_where_it_was_written() -> None:
    files = tracked(
        ".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".sh", "Makefile", "Dockerfile", "run"
    )
    found = [
        f"{path}:{number}: {match.group()}"
        for path in files
        for number, line in enumerate(read(path).splitlines(), start=1)
        if (match := LOCAL_WORDS.search(line))
    ]
    assert not found, "\n".join(found)


def test_pins_in_pyproject_agree_with_the_requirements_files() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    files = {"cpu": ("cpu", "dev"), "gpu": ("gpu", "tracking")}
    for first, names in files.items():
        locked: dict[str, str] = {}
        for file in (f"{first}.txt", "dev.txt"):
            locked |= _pins(_lines(f"requirements/{file}"))
        wanted = [*project["dependencies"], *(line for name in names for line in extras[name])]
        differ = [
            f"{requirement}, not {locked.get(_normalized(requirement.name))}"
            for requirement in map(Requirement, wanted)
            if not requirement.specifier.contains(locked.get(_normalized(requirement.name), "0"))
        ]
        assert not differ, f"pyproject.toml and requirements/{first}.txt: {differ}"


def test_ranges_begin_at_a_version_that_is_tested_and_end() -> None:
    """Exact are packages whose names are replaced or extended, or that SGLang asks for exactly."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    locked = {name: _pins(_lines(f"requirements/{name}.txt")) for name in ("cpu", "dev", "gpu")}
    wrong, exact = [], set()
    lines = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    for requirement in map(Requirement, lines):
        bounds = {each.operator: each.version for each in requirement.specifier}
        name = _normalized(requirement.name)
        if bounds.keys() == {"=="}:
            exact.add(name)
        elif bounds.keys() != {">=", "<"}:
            wrong.append(f"{requirement}: no range with both ends")
        elif bounds[">="] not in {pins.get(name) for pins in locked.values()} - {None} and any(
            name in pins for pins in locked.values()
        ):
            wrong.append(f"{requirement}: no lock file has its first version")
    assert not wrong, "\n".join(wrong)
    assert exact == {*REPLACED, *AS_SGLANG_ASKS, "emerging-optimizers", "torch"}


def test_sglang_asks_for_these_versions_exactly() -> None:
    asked = [Requirement(line) for line in metadata.requires("sglang") or ()]
    fixed = {_normalized(each.name) for each in asked if str(each.specifier).startswith("==")}
    assert fixed >= AS_SGLANG_ASKS


def test_hydra_and_math_verify_have_one_antlr_and_agents_another_without_hydra() -> None:
    """hydra and omegaconf read with antlr 4.9 alone; math-verify reads with any of three."""
    antlr = "antlr4-python3-runtime"
    for name in ("cpu", "gpu"):
        pins = _pins(_lines(f"requirements/{name}.txt"))
        assert pins[antlr] == "4.9.3" and {"hydra-core", "omegaconf", "math-verify"} <= pins.keys()
    agents = _pins(_lines("requirements/agents.txt"))
    assert agents[antlr] == "4.13.2" and "math-verify" in agents
    assert not {"hydra-core", "omegaconf"} & agents.keys()
    for name in ("hydra-core", "omegaconf"):
        assert f"{antlr}==4.9.*" in (metadata.requires(name) or ())


@pytest.mark.parametrize(
    "path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.name
)
def test_every_requirement_is_pinned(path: Path) -> None:
    loose = [line for line in _lines(path) if not re.fullmatch(r"[\w.-]+==[\w.+!-]+", line)]
    assert not loose, f"{path.name}: not name==version: {loose}"


def device_words(tree: ast.Module) -> list[tuple[int, str]]:
    """(line, word) wherever code, not its docstrings, names a CUDA library."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        (node.lineno, match.group())
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant | ast.Attribute | ast.Import | ast.ImportFrom)
        if not (isinstance(node, ast.Constant) and id(node) in docstrings)
        for match in DEVICE_WORDS.finditer(ast.unparse(node))
    ]


def _lines(path: str | Path) -> list[str]:
    lines = (ROOT / path).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _pins(requirements: list[str]) -> dict[str, str]:
    """Normalized name -> version of each exact pin, without a local build such as +cpu."""
    pins = {}
    for name, _, version in (requirement.partition("==") for requirement in requirements):
        if version:
            pins[_normalized(name.partition("[")[0])] = version.partition("+")[0]
    return pins


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
