"""Tries a documented command: as written, shortened, or dry where it needs GPUs."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.house.test_documents import commands
from tests.support.policy import read

How = Literal["run", "short", "dry", "elsewhere", "not ours"]

# After fewer steps no two responses of a model differ in reward, and there is no pair of them.
STEPS = {
    "sft": ("sft.steps=60",),
    "train": ("run.steps=2",),
    "dpo": ("dpo.steps=2", "dpo.batch_size=8"),
    # Documents make pairs twice, and a run that goes on wants as many as before.
    "pairs": ("dpo.prompts=32", "eval.max_prompts=32", "rollout.deterministic=true"),
    "eval": (),
    "agent": (),
}
SHORT = (
    "rollout.prompts_per_step=6",  # samples of a step are divided by up to six mini-batches
    "rollout.samples_per_prompt=4",
    "eval.max_prompts=8",
    "rollout.kv_cache_len=8192",
)
FEWER_PROMPTS = "rollout.prompts_per_step=32"
"""A search that simulates all prompts of a step takes half a minute."""
SHORT_RESPONSE = "rollout.max_response_len=16"
LONG_TURNS = "recipe=tiny_agent_code"
"""A recipe with turns that are longer than a short response, which is refused."""
QUICK = (
    "options",
    "plan",
    "simulate",
    "data",
    "doctor",
    "submit",
    "translate",
    "--help",
    "--version",
)
OF_JOBS = ("submit", "status", "logs", "cancel")
OF_LIVE_RUNS = ("engines",)
"""Commands about a run under way; e2e/test_engine_requests.py tries them."""
ELSEWHERE = (
    "/data/",
    "/models/",
    "=Qwen/",
    "=HuggingFaceTB/",
    "hf://",
    "http://",
    "cluster.address=",
    "10.0.0.",
)
"""Parts of arguments that name what only the reader's own cluster has."""


@dataclass(frozen=True)
class Documented:
    """One command of a document, and how a test tries it."""

    document: str
    words: tuple[str, ...]

    @property
    def how(self) -> How:
        program = Path(self.words[0]).name
        arguments = self.words[1:]
        if program == "mcore-rl-ckpt":
            return "run"
        if program == "make":
            return "dry"
        if program != "mcore-rl":
            return "not ours"
        if arguments[0] in OF_JOBS:
            return "run" if "--dry-run" in arguments else "elsewhere"
        if arguments[0] in OF_LIVE_RUNS:
            return "elsewhere"
        if any(part in word for word in arguments for part in ELSEWHERE):
            return "elsewhere"
        if arguments[0] in (*QUICK, "report", "ledger") or "rehearse=true" in arguments:
            return "run"
        if arguments[0] in ("serve", "sandbox", "view") or any(
            "recipe=tiny" in word for word in arguments
        ):
            return "short"
        return "dry"

    @property
    def is_quick(self) -> bool:
        """Whether it takes seconds and needs nothing that another command makes."""
        program, *arguments = self.words
        if program == "make" or self.how == "dry":
            return True
        return program == "mcore-rl" and self.how == "run" and arguments[0] in QUICK

    def attempt(self) -> list[str]:
        """The command line that a test runs in its place."""
        program, *arguments = self.words
        if program == "make":
            return ["make", "-n", *arguments]
        if self.how == "dry":
            return ["mcore-rl", "plan", *arguments[1:]]
        if self.how == "short" and arguments[0] == "serve":
            return [
                program,
                *arguments,
                *(() if "--ask" in arguments else ("--ask", "hello")),
                "--once",
            ]
        if self.how == "short" and arguments[0] in ("sandbox", "view"):
            return [program, *arguments, "--once"]
        if self.how == "short":
            response = () if LONG_TURNS in arguments else (SHORT_RESPONSE,)
            return [program, *arguments, *SHORT, *response, *STEPS[arguments[0]]]
        if arguments[0] == "simulate":
            return [program, arguments[0], FEWER_PROMPTS, *arguments[1:]]
        return list(self.words)

    def __str__(self) -> str:
        return f"{self.document}: {shlex.join(self.words)}"


def documented(*documents: str) -> list[Documented]:
    """The commands of these documents, in order."""
    return [
        Documented(document, tuple(words))
        for document in documents
        for words in commands(read(Path(document)))
    ]


def own_algorithm() -> str:
    """Return the source of my_algo.py, the example of an algorithm of one's own."""
    text = read(Path("docs/algorithms.md"))
    found = re.search(r'^```python\n("""my_algo.py.*?)^```', text, re.MULTILINE | re.DOTALL)
    assert found, "docs/algorithms.md has no my_algo.py"
    return found[1]


def in_workspace(words: Sequence[str], workspace: Path) -> list[str]:
    """Return `words` with the newest checkpoint in place of one that a short run did not reach."""
    replaced = []
    for word in words:
        path = Path(word)
        if path.parent.name == "checkpoints" and not (workspace / path).exists():
            kind = path.name.partition("_")[0]
            newest = max((workspace / path.parent).glob(f"{kind}_*"))
            word = str(path.with_name(newest.name))
        replaced.append(word)
    return replaced
