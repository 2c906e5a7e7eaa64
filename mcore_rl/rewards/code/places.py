"""The one way in which code of a reward reaches a sandbox: in this process, or on a server.

request --> the server of the recipe, else that of the run, else this process's sandbox --> result
              ^ again, if the sandbox was lost meanwhile
"""

from mcore_rl.process import run_servers
from mcore_rl.process.redaction import redact
from mcore_rl.rewards.code.server import run_on_server
from mcore_rl.services.sandbox.execution import CodeRequest, CodeResult
from mcore_rl.services.sandbox.limits import RunVerdict, SandboxError
from mcore_rl.services.sandbox.run import run_code

ATTEMPTS = 3
"""A sandbox that something outside has killed is another one at the next attempt."""


def execute(request: CodeRequest, url: str = "") -> CodeResult:
    """Return how a program ended, whatever it did.

    url   a server of SandboxFusion's API, or empty, as in `server_of`

    Raises SandboxError if no attempt found a sandbox that works, and ValueError for a language that
    its machine does not have.
    """
    url = server_of(url)
    why = ""
    for _ in range(ATTEMPTS):
        result = run_on_server(url, request) if url else run_code(request)
        if result.verdict != RunVerdict.SANDBOX_ERROR:
            return result
        why = result.message
    where = f"the sandbox at {redact(url)}" if url else "the sandbox of this process"
    raise SandboxError(f"{where} failed {ATTEMPTS} times, at last: {why}")


def server_of(url: str) -> str:
    """Return the server on which programs run; empty: they run in the sandbox of this process.

    url   the server that the recipe names; empty: the one that the run has started, if it has
    """
    return url or run_servers.sandbox_url()
