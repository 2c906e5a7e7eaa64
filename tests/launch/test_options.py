"""Launch options that contradict one another are refused, and each option is read somewhere."""

import ast
from collections.abc import Iterator
from dataclasses import fields

import pytest

from launch.options import SlurmOptions
from launch.targets import TARGETS
from launch.text import TEMPLATES
from tests.support.policy import parse, python_files


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"container": "pyxis"}, "launch.container=pyxis with launch.image='': give both"),
        ({"image": "a.sqsh"}, "launch.container=none with launch.image='a.sqsh'"),
        ({"mounts": ["/data:/data"]}, r"launch.mounts=\['/data:/data'\]: nothing is mounted"),
        ({"engine_constraint": "h200"}, "launch.engine_constraint=h200: engines have nodes"),
        ({"container": "docker"}, "launch.container='docker': expected one of"),
        ({"environment": {"HF_TOKEN": "a"}}, "launch.environment.HF_TOKEN: the job's files would"),
        ({"nodes": 0}, "launch.nodes=0: must be at least 1"),
        ({"save_before_end_s": 5}, "launch.save_before_end_s=5: must be at least 30"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlurmOptions(target="slurm", **options)  # pyright: ignore[reportArgumentType]


def test_every_launch_option_is_read() -> None:
    read = {name for path in python_files("launch") for name in attributes_read(parse(path))}
    read |= {"reservation", "account", "qos"}  # by getattr in launch/slurm.py
    templates = "".join(path.read_text() for path in sorted(TEMPLATES.glob("*.jinja")))
    unread = {
        f"{target}: {option.name}"
        for target, kind in TARGETS.items()
        for option in fields(kind.options)
        if option.name not in read and f"options.{option.name}" not in templates
    }
    assert not unread


def attributes_read(node: ast.AST) -> Iterator[str]:
    """Yield the attributes that are read below a node, but for the checks of a class."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.FunctionDef) and child.name == "__post_init__"):
            yield from attributes_read(child)
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield node.attr


def test_ray_gets_the_shared_memory_that_is_asked_for() -> None:
    assert SlurmOptions(object_store_mib=100).store_mib(gpus_per_node=8) == 100
    assert SlurmOptions().store_mib(gpus_per_node=8) > SlurmOptions().store_mib(gpus_per_node=0)
