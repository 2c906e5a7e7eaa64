"""Environments that note each sign of life, and a killer of the parts of a run of episodes."""

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.runs import Run

WAIT_S = 600.0
"""For whatever a test waits for: machines are busy."""
TRAINED = ": train\n"
"""Ends the line of a step that begins to train; the line of a node names a trainer, too."""
TOOL = "chaos_tool"
PROGRAM = "chaos_program"
ENVIRONMENT = '''
import json, os, random, subprocess, time, uuid
from pathlib import Path
from mcore_rl.agents.environments.environment import Start, Step

class ToolTalk:
    """Three questions; after each a tool is started that may be killed, and sometimes hangs."""

    def __init__(self, notes):
        self.notes = Path(notes)

    def note(self):
        line = {"name": self.name, "pid": os.getpid(), "at_s": time.time()}
        with (self.notes / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\\n")

    def reset(self, task):
        self.name = f"{task['index']} {task['sample_index']} {uuid.uuid4().hex}"
        self.left = 3
        self.note()
        return Start(list(task["messages"]))

    def step(self, message):
        self.note()
        self.left -= 1
        seconds = "1000" if random.random() < 0.02 else "0.2"
        tool = subprocess.run(["chaos_tool", seconds], executable="/bin/sleep")
        if tool.returncode:
            return Step(done=True, end_reason="tool_error")
        question = {"role": "user", "content": "what is 1 + 1 ?"}
        return Step([question], reward=float(self.left == 1), done=self.left == 0)

    def close(self):
        pass
'''
CLIENT = """
import json, os, random, sys, time, urllib.request, uuid
from pathlib import Path

name, pid = uuid.uuid4().hex, os.getpid()

def note():
    line = {"name": name, "pid": pid, "at_s": time.time()}
    with (Path(sys.argv[2]) / f"{pid}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\\n")

def ask(messages):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
               "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]

note()
messages = [{"role": "user", "content": "what is 1 + 1 ?"}]
for _ in range(2):
    messages += [ask(messages), {"role": "user", "content": "what is 1 + 2 ?"}]
    note()
if random.random() < 0.02:
    while True:
        note()
        time.sleep(0.1)
print(json.dumps({"reward": random.random()}))
"""
WORDS: Mapping[str, tuple[str, ...]] = {
    "worker": ("mcore_rl.agents.environments.worker",),
    "tool": (TOOL,),
    "program": (f" {PROGRAM} ",),  # the controller has the word between commas
    "collector": ("ray::collector_rank0",),
    "engine": ("mcore_rl.rollout.server",),
    "scheduler": ("sglang::scheduler",),
}
"""Words of the command lines of what is killed. The gateway is part of the collector."""
HEAVY = ("collector", "engine", "scheduler")
"""After their deaths the run is left alone until it trains again."""


@dataclass
class Chaos:
    """Kills processes of runs at random moments; counts them, and who they were."""

    seed: int
    kills: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def strike(self, run: Run, budget: Mapping[str, int]) -> None:
        """Kill as many processes of each kind as `budget` says."""
        run.wait_for(TRAINED, WAIT_S)
        order = [kind for kind, number in budget.items() for _ in range(number)]
        self._random.shuffle(order)
        for kind in order:
            time.sleep(self._random.uniform(0.0, 1.0))
            trained = run.log().count(TRAINED)
            below = self._kill(run, kind)
            if kind in HEAVY:
                assert_gone(below)
                run.wait_until(
                    lambda before=trained: run.log().count(TRAINED) > before + 1,
                    f"steps after the death of {kind}",
                    WAIT_S,
                )

    def end(self, run: Run, how: signal.Signals) -> None:
        """End the controller; nothing of the run may be left."""
        time.sleep(self._random.uniform(0.0, 1.0))
        run.process.send_signal(how)
        self.kills["controller"] += how is signal.SIGKILL
        status = run.finish(180)
        assert status == (-9 if how is signal.SIGKILL else 130), run.tail()
        run.assert_nothing_left()

    def _kill(self, run: Run, kind: str) -> list[psutil.Process]:
        """Kill a process, once there is one; return what must end with it."""
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            assert run.process.poll() is None, run.tail()
            found = run.find(*WORDS[kind])
            try:
                victim = self._random.choice(found)
                below = run.find(*WORDS["program"]) + run.find(TOOL) if kind == "collector" else []
                victim.kill()
            except (IndexError, psutil.NoSuchProcess):
                time.sleep(0.01)
                continue
            self.kills[kind] += 1
            return below
        raise AssertionError(f"the test waited {WAIT_S:g} s for a {kind} to kill:\n{run.tail()}")


def assert_gone(processes: list[psutil.Process], within_s: float = 20.0) -> None:
    """Check that these processes end."""
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    left = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not left, f"{left} are there {within_s} s after their collector was killed"


def lifetimes_s(notes: Path) -> list[float]:
    """Return how long each episode gave signs of life; one that began again counts twice."""
    signs: dict[str, list[float]] = {}
    for path in notes.glob("*.jsonl"):
        *lines, _ = path.read_text().split("\n")
        for line in map(json.loads, lines):
            signs.setdefault(line["name"], []).append(line["at_s"])
    return [max(at_s) - min(at_s) for at_s in signs.values()]
