"""A command refuses what it cannot use, such as code of the user, before it starts a process."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mcore_rl.config import Config
from mcore_rl.config.recipe import load_recipe
from mcore_rl.data.rows import write_parquet
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.run.agent import run_agent
from mcore_rl.run.commands import _run, run_eval, run_pairs, run_sft, run_train
from mcore_rl.tasks.shapes import prepare_shapes
from mcore_rl.tasks.tiny_models import qwen3_moe_config
from mcore_rl.weights.hf.config import ModelFacts
from tests.agents.environments import episodes
from tests.support.chat_templates import make_tokenizer
from tests.support.odd_images import encode, noise


@pytest.mark.parametrize(
    ("command", "subfolder"), [("train", "."), ("sft", "."), ("eval", "eval"), ("pairs", "pairs")]
)
def test_a_folder_in_use_is_refused(command: str, subfolder: str, tmp_path: Path) -> None:
    config = load_recipe("qwen3_30b_a3b_grpo_8", [f"run.dir={tmp_path}"])
    policy = ModelFacts.read(config.model.path)
    folder = tmp_path / subfolder
    with (
        RunFolder(folder).lock(),
        pytest.raises(ValueError, match=rf"^the run folder {folder} is in use by process \d+ on "),
        _run(config, policy, command),
    ):
        raise AssertionError("the command began")
    assert [path.name for path in folder.iterdir()] == ["run.lock"], "something was written"


def play(config: Config) -> None:
    run_agent(config, 1, greedy=True)


COMMANDS = {"train": run_train, "eval": run_eval, "pairs": run_pairs, "agent run": play}
"""All commands that run code which a recipe names."""
CODE = {
    "import.py": "import no_such_package_of_a_user\n",
    "exit.py": "import sys\nsys.exit(3)\n",
    "syntax.py": "def reward(:\n",
    "empty.py": "",
    "raise.py": "LIMIT = int('many')\n",
}
INSTALL = "install (it|no_such_package_of_a_user) for "
REWARDS = [
    ("nowhere.py", r"reward.path=nowhere.py: no such file in "),
    ("import.py", rf"reward.path=\S*import.py: importing it failed at line 1: .*: {INSTALL}"),
    (
        "exit.py",
        r"reward.path=\S*exit.py: .* at line 2: SystemExit: the code tried to end the process",
    ),
    ("syntax.py", r"reward.path=\S*syntax.py: importing it failed: SyntaxError: .*line 1"),
    ("raise.py", r"reward.path=\S*raise.py: importing it failed at line 1: ValueError: invalid"),
    ("empty.py", r"reward.name=reward: \S*empty.py has no such function; it has none"),
]
ENVIRONMENTS = [
    ("nowhere.py:Game", r"agents.environment=\S*nowhere.py:Game.*: there is no file \S*nowhere.py"),
    ("no_such_package_of_a_user:Game", "finds no module 'no_such_package_of_a_user'.*: install it"),
    ("import.py:Game", rf"ModuleNotFoundError: .*, at \S*import.py line 1; {INSTALL}"),
    (
        "exit.py:Game",
        r"the code tried to end the process with status 3, at \S*exit.py line 2;",
    ),
    ("syntax.py:Game", r"SyntaxError: .*syntax.py, line 1"),
    ("raise.py:Game", r"ValueError: invalid .*, at \S*raise.py line 1; mend it"),
    ("empty.py:Game", r"empty.py has no 'Game', which "),
]
ALGORITHMS = [
    ("nowhere.py", r"algorithm.path=nowhere.py: no such file in "),
    ("import.py", rf"algorithm.path=\S*import.py line 1: ModuleNotFoundError: .*: {INSTALL}"),
    ("exit.py", r"algorithm.path=\S*exit.py line 2: SystemExit: the code tried to end the"),
    ("syntax.py", r"algorithm.path=\S*syntax.py line 1: SyntaxError"),
    ("raise.py", r"algorithm.path=\S*raise.py line 1: ValueError: invalid"),
    ("empty.py", r"algorithm.path=\S*empty.py: registers no advantage and no loss; decorate"),
]
ENGINES = [
    ("rollout.tp=8", r"rollout.tp=8 does not divide num_attention_heads="),
    ("rollout.speculate=ngram", r"rollout.speculate=ngram with drift.routed_experts=true: SGLang"),
]


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Servers of forks, which other tests started, stay."""
    before = psutil.Process().children()
    yield
    left = [child for child in psutil.Process().children() if child not in before]
    assert not left


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model without weights, files of code, and no file of prompts."""
    make_tokenizer("qwen3").save_pretrained(tmp_path / "model")
    (tmp_path / "model/config.json").write_text(json.dumps(qwen3_moe_config(400)))
    for name, text in CODE.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusals() -> list[tuple[str, list[str], str]]:
    """Return (command, settings, message) for each loader and fault, and for each other command
    with the first faults of each loader; for all commands what their engines cannot serve.
    """
    found = []
    for command in COMMANDS:
        played: list[str] = []
        num = None if command == "train" else 2
        if command == "agent run":  # rewards of files score no episode there
            played = [f"agents.environment={episodes.HERE}:Countdown", "reward.path="]
        else:
            found += [(command, [f"reward.path={file}"], text) for file, text in REWARDS[:num]]
        found += [(command, [f"algorithm.path={x}", *played], text) for x, text in ALGORITHMS[:num]]
        found += [(command, [option, *played], text) for option, text in ENGINES]
        for kind, text in ENVIRONMENTS[:num]:
            found.append((command, [f"agents.environment={kind}", "reward.path="], text))
    return found


@pytest.mark.parametrize(("command", "settings", "message"), refusals())
def test_what_cannot_be_used_is_refused_before_data_and_processes(
    folder: Path, command: str, settings: list[str], message: str
) -> None:
    """There are no prompts, so that a command which reads them first fails otherwise."""
    of_model = [f"model.path={folder / 'model'}", "model.init=random"]
    of_data = ["data.train=[no_prompts.jsonl]", "eval.data=[no_prompts.jsonl]"]
    of_run = [f"run.dir={folder / 'run'}", *settings]
    config = load_recipe("tiny_moe_grpo", [*of_model, *of_data, *of_run])
    run: Callable[[Config], None] = COMMANDS[command]
    with pytest.raises(ValueError, match=message):
        run(config)
    assert not (folder / "run").exists()


def image_row(image: object) -> dict[str, object]:
    return {
        "prompt": [{"role": "user", "content": "<image> what is it ?"}],
        "messages": [
            {"role": "user", "content": "<image> what is it ?"},
            {"role": "assistant", "content": "red"},
        ],
        "images": [image],
        "data_source": "shapes",
        "reward_model": {"ground_truth": "red"},
    }


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    prepare_shapes(folder)
    return folder


BAD_IMAGES = {
    "https://host/a.png": "row 1, image 0 is a URL, 'https://host/a.png': nothing is downloa",
    "gone.png": "row 1, image 0: '.*gone.png' cannot be read: No such file",
    "bad.png": "row 1, image 0 is none of BMP, GIF, .*: convert it, or remove the row",
}


@pytest.mark.parametrize(
    ("command", "image", "message"),
    [
        pytest.param(
            *(command, image, message),
            marks=[] if command == "train" or image == "gone.png" else pytest.mark.slow,
        )
        for command in ("train", "eval", "pairs", "sft")
        for image, message in BAD_IMAGES.items()
    ],
)
def test_a_bad_image_is_named_before_processes(
    shapes: Path, tmp_path: Path, command: str, image: str, message: str
) -> None:
    (tmp_path / "good.png").write_bytes(encode(noise(56, 56)))
    (tmp_path / "bad.png").write_bytes(b"no picture")
    rows = [image_row("good.png"), image_row(image)]
    write_parquet(rows, tmp_path / "rows.parquet")
    files = f"[{tmp_path / 'rows.parquet'}]"
    of_data = [f"{name}={files}" for name in ("data.train", "eval.data", "sft.data")]
    of_model = [f"model.path={shapes / 'model'}", "model.init=random"]
    config = load_recipe("tiny_vlm_grpo", [*of_model, *of_data, f"run.dir={tmp_path / 'run'}"])
    run: Callable[[Config], None] = {**COMMANDS, "sft": run_sft}[command]
    with pytest.raises(ValueError, match=message):
        run(config)
    assert not (tmp_path / "run").exists()
