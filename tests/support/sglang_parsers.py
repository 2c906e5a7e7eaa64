"""A child process with SGLang's own parsers: lines of JSON in, lines of JSON out.

Run as a module it is the child. It answers as the engine's endpoints do.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from threading import Lock, Timer
from typing import Any

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 180.0
ANSWER_TIMEOUT_S = 60.0


class ParserProcess:
    """The child and the pipes to it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.sglang_parsers"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lock = Lock()
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        """Every path and body since the test began."""
        assert self._read(START_TIMEOUT_S) == {"ready": True}

    async def ask(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer as the engine's `path` does; ValueError if it would answer with an error."""
        self.asked.append((path, body))
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps([path, body]) + "\n")
            self._process.stdin.flush()
            answer = self._read(ANSWER_TIMEOUT_S)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        """Return the next line that the child writes; it is killed when the time is over."""
        assert self._process.stdout is not None
        timer = Timer(timeout_s, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            _, errors = self._process.communicate()
            raise AssertionError(
                f"the test waited {timeout_s:g} s for SGLang's parsers, which ended:\n"
                f"{errors[-4000:]}"
            )
        return json.loads(line)


def main() -> None:
    out = sys.stdout
    sys.stdout = sys.stderr  # what SGLang prints stays out of the answers
    from mcore_rl.device.sglang_setup import use_cpu

    use_cpu([])
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    def answer(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if path == "/separate_reasoning":
            parser = ReasoningParser(body["reasoning_parser"])
            reasoning, text = parser.parse_non_stream(body["text"])
            return {"reasoning_text": reasoning, "text": text}
        assert path == "/parse_function_call", path
        tools = [Tool(**tool) for tool in body["tools"]]
        calls = FunctionCallParser(tools, body["tool_call_parser"])
        normal_text, items = calls.parse_non_stream(body["text"])
        return {"normal_text": normal_text, "calls": [item.model_dump() for item in items]}

    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        path, body = json.loads(line)
        try:
            reply = answer(path, body)
        except Exception as error:  # the engine answers with status 500
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=out, flush=True)


if __name__ == "__main__":
    main()
