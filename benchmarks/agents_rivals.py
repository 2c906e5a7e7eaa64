"""Gateways of other projects that record episodes; each has a folder of packages of its own."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rival_packages import install_once, pip_install

FOLDER = Path(__file__).resolve().parent / ".agents-rivals"
DEADLINE_S = 600


@dataclass(frozen=True)
class Rival:
    """A gateway's script, and the packages that it needs besides the environment's.

    The packages are installed without their requirements.
    """

    script: str
    pins: tuple[str, ...]

    @property
    def site(self) -> Path:
        return FOLDER / self.script.removesuffix(".py")

    def install(self) -> None:
        arguments = ["--upgrade", "--target", str(self.site), *self.pins]
        wanted = "\n".join(self.pins)
        install_once(
            self.site, wanted, lambda: pip_install(sys.executable, *arguments, timeout_s=DEADLINE_S)
        )


RIVALS = {
    "rllm": Rival("agents_rllm.py", ("rllm-model-gateway==0.1.0", "aiosqlite==0.22.1")),
    "verifiers": Rival(
        "agents_verifiers.py",
        (
            "verifiers==0.4.0",
            "aiofiles==25.1.0",
            "anthropic==2.13.0",
            "connectrpc==0.11.1",
            "docstring_parser==0.18.0",
            "gepa==0.1.4",
            "httpcore2==2.16.2",
            "httpx2==2.16.2",
            "mcp==2.0.0",
            "mcp_types==2.3.0",
            "msgpack==1.2.4",
            "openai==2.54.0",
            "opentelemetry_api==1.45.2",
            "prime_pydantic_config==0.4.3",
            "prime_runs==0.1.4",
            "prime_sandboxes==0.5.1",
            "prime_tunnel==0.1.15",
            "protobuf_py==0.1.1",
            "protobuf_py_ext==0.1.1",
            "pyqwest==0.12.0",
            "renderers==0.1.12",
            "tenacity==9.2.1",
            "tomli_w==1.2.0",
            "truststore==0.10.5",
        ),
    ),
}


def python_path(script: str, *folders: Path) -> str:
    """Return PYTHONPATH for a script: these folders, and its packages if it is a rival's."""
    sites = [rival.site for rival in RIVALS.values() if rival.script == script]
    return os.pathsep.join(map(str, [*folders, *sites]))
