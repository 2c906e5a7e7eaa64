"""Every target has all that the commands ask of one."""

from launch.compose import load_launch
from launch.targets import TARGETS


def test_the_shipped_launch_file_of_a_target_has_its_options() -> None:
    for name, target in TARGETS.items():
        assert type(load_launch(name, [])) is target.options
