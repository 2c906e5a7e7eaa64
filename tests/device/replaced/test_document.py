"""The document of the registry: every entry has a row, every name a line, every table its width."""

from mcore_rl.device.replaced import PATCHES
from mcore_rl.device.replaced.document import make_document


def test_every_patch_has_a_row_and_every_name_a_line() -> None:
    lines = make_document().splitlines()
    for patch in PATCHES:
        rows = [line for line in lines if line.startswith(f"| `{patch.function}`")]
        assert any(patch.by in row and patch.reason in row for row in rows), patch.where
        for name in patch.names:
            module = patch.where.partition(":")[0]
            assert f"| `{name}` | `{patch.function}` | {module} |" in lines


def test_rows_of_gpus_say_whether_they_are_measured_and_how_to_switch_them_off() -> None:
    row = next(
        line for line in make_document().splitlines() if line.startswith("| `compute_prompts_once`")
    )
    assert "| in every step; not measured; off by default |" in row
    assert "| `rollout.share_prompts=false`, the default with GPUs |" in row


def test_tables_have_as_many_cells_as_columns() -> None:
    width = 0
    for line in make_document().splitlines():
        if not line.startswith("|"):
            width = 0
            continue
        cells = line.strip("|").split(" | ") if "---" not in line else line.strip("|").split("|")
        assert all(cells) and len(cells) == (width or len(cells)), line
        width = len(cells)
