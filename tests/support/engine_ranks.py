"""The ranks of an SGLang engine that is linked as in a run, but does not serve."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0


class EngineRanks:
    """The ranks of an engine that does not serve, each in a process (unserved_engine.py)."""

    def __init__(self, hf_dir: Path, sizes: Mapping[str, Any]) -> None:
        self._processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.support.unserved_engine",
                    json.dumps({"hf_dir": str(hf_dir), "sizes": sizes, "rank": rank}),
                ],
                env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(hf_dir / f"engine{rank}.log").open("w"),
                text=True,
            )
            for rank in range(sizes["tp"])
        ]
        self._logs = [hf_dir / f"engine{rank}.log" for rank in range(sizes["tp"])]
        self._pool = ThreadPoolExecutor(len(self._processes))
        self.answers()

    def ask(self, **request: Any) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()

    def answers(self) -> list[dict[str, Any]]:
        """One per rank, within TIMEOUT_S."""
        lines = [
            self._pool.submit(process.stdout.readline)
            for process in self._processes
            if process.stdout
        ]
        found = [line.result(timeout=TIMEOUT_S) for line in lines]
        assert all(found), "\n".join(log.read_text()[-3000:] for log in self._logs)
        return [json.loads(line) for line in found]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._pool.shutdown()
