"""Clients of SandboxFusion, unchanged: verl's reward and the client of its own package.

Both come from .venv-agents (`make agents-venv`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
AGENTS = ROOT / ".venv-agents"
PACKAGE = AGENTS / "verl/verl/utils/reward_score/sandbox_fusion"
VERL = """
import importlib.util, json, sys, threading
folder, url = sys.argv[1:3]
# The package above imports all of verl.
spec = importlib.util.spec_from_file_location(
    "sandbox_fusion", folder + "/__init__.py", submodule_search_locations=[folder]
)
package = sys.modules["sandbox_fusion"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
TESTS = {"inputs": ["1\\n", "2\\n"], "outputs": ["2", "4"]}
CALLS = {"inputs": ["1\\n2", "3\\n4"], "outputs": ["3", "7"], "fn_name": "f"}
def score(code, tests=TESTS, timeout=20):
    found, cases = package.compute_score(
        url, threading.Semaphore(4), 1024, f"```python\\n{code}\\n```", tests, timeout=timeout
    )
    return found, [case["status"] for case in cases]
def check(code, language):
    tests = {"inputs": ["5"], "outputs": ["25"]}
    found, cases = package.check_correctness(url, tests, code, timeout=60, language=language)
    return found, [case["status"] for case in cases]
print(json.dumps({
    "right": score("print(int(input()) * 2)"),
    "half": score("input(); print(2)"),
    "late": score("while True: pass", timeout=1),
    "fails": score("1 / 0"),
    "function": score("def f(a, b): return a + b", CALLS),
    "cpp": check("#include <iostream>\\nint main() { int x; std::cin >> x; std::cout << x * x; }",
                 "cpp"),
    "no cpp": check("int main() {", "cpp"),
    "missing": check("x", "verilog"),
}))
"""
FUSION = """
import base64, sys
from sandbox_fusion import RunCodeRequest, run_code
url = sys.argv[1]
def run(**fields): return run_code(RunCodeRequest(**fields), url, max_attempts=1)
made = run(code="open('b', 'w').write(open('a').read() * 2)", language="python",
           files={"a": base64.b64encode(b"x").decode()}, fetch_files=["b"])
assert made.status.value == "Success", made
assert base64.b64decode(made.files["b"]) == b"xx"
late = run(code="while True: pass", language="python", run_timeout=1)
assert late.status.value == "Failed", late
assert late.run_result.status.value == "TimeLimitExceeded"
compiled = run(code="int main() { return 3; }", language="cpp", compile_timeout=60)
assert (compiled.compile_result.return_code, compiled.run_result.return_code) == (0, 3)
print("all")
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    command = [sys.executable, "-m", "mcore_rl.cli", "sandbox", "serve", "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "sandbox at " in line, line + process.stderr.read()
    yield line.split("sandbox at ")[1].split("/run_code")[0]
    process.terminate()
    process.wait(60)


def python(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(AGENTS / "bin/python"), "-c", source, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


@pytest.mark.slow
@pytest.mark.skipif(not PACKAGE.is_dir(), reason="no verl in .venv-agents")
def test_rewards_of_verl_work_by_the_url_alone(address: str) -> None:
    done = python(VERL, str(PACKAGE), f"{address}/run_code")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "right": [1.0, ["success", "success"]],
        "half": [0.5, ["success", "wrong_answer"]],
        "late": [0.0, ["timeout", "timeout"]],
        "fails": [0.0, ["runtime_error", "runtime_error"]],
        "function": [1.0, ["success", "success"]],
        "cpp": [[True], ["success"]],
        "no cpp": [[-4], ["compile_error"]],
        "missing": [[-1], ["api_error"]],
    }


@pytest.mark.slow
@pytest.mark.skipif(not AGENTS.is_dir(), reason="no .venv-agents")
def test_the_client_of_sandbox_fusion_works(address: str) -> None:
    if python("import sandbox_fusion").returncode:
        pytest.skip("no sandbox-fusion in .venv-agents")
    done = python(FUSION, address)
    assert done.stdout == "all\n", done.stderr
