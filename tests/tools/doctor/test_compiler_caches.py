"""Compilers keep their work in one folder, unless the user has named another."""

from pathlib import Path

from mcore_rl.tools.doctor.command import keep_compiled


def test_every_compiler_is_named_a_folder_below_the_one_that_is_carried(tmp_path: Path) -> None:
    environ = {"TRITON_CACHE_DIR": "/elsewhere"}
    keep_compiled(tmp_path, environ)
    assert environ == {
        "TRITON_CACHE_DIR": "/elsewhere",
        "TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/inductor",
        "SGLANG_CACHE_DIR": f"{tmp_path}/sglang",
        "CUDA_CACHE_PATH": f"{tmp_path}/driver",
    }


def test_a_relative_folder_holds_in_processes_that_start_elsewhere() -> None:
    environ: dict[str, str] = {}
    keep_compiled(Path("caches"), environ)
    assert environ["TRITON_CACHE_DIR"] == str(Path.cwd() / "caches" / "triton")
