"""umask decides who may read the files of a run; only secrets are closed whatever it says."""

import ast

from tests.support.policy import parse, python_files

CLOSED_WHATEVER_UMASK_SAYS = {"NamedTemporaryFile", "mkstemp", "save_file"}
"""They make files of mode 0600."""
ALLOWED = {
    "mcore_rl/weights/hf/files.py": "gives the file its mode afterwards",
    "mcore_rl/cluster/session.py": "Ray's token",
    "mcore_rl/cluster/node_agent/job.py": "the token of a cluster",
    "mcore_rl/rewards/code/driver.py": "a file without a name",
}


def test_no_other_file_is_closed_whatever_umask_says() -> None:
    found = {
        str(path)
        for path in python_files("mcore_rl", "launch", "checkpoint_tools")
        if "standins" not in path.parts and makes_closed_files(parse(path))
    }
    assert found == set(ALLOWED), "let umask decide, as weights.hf.files.save_tensors does"


def makes_closed_files(tree: ast.Module) -> bool:
    """Return whether a call makes a file that has fewer permissions than umask gives."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        modes = [ast.literal_eval(mode) for mode in node.args[2:3]] if called == "os.open" else []
        if called.rpartition(".")[2] in CLOSED_WHATEVER_UMASK_SAYS or modes not in ([], [0o666]):
            return True
    return False
