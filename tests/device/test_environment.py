"""Environment variables of a run's processes: which they share, how they differ, which GPUs."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from mcore_rl.device.environment import (
    AGREED,
    can_release_graphs,
    choose_agreed,
    choose_queues,
    differences,
    local_indices,
    refuse_fixed_graphs,
    select_forwarded,
)


def test_what_steers_the_libraries_is_forwarded_and_secrets_are_not() -> None:
    environ = {
        "NCCL_DEBUG": "INFO",
        "SGLANG_USE_X": "1",
        "HF_HOME": "/models",
        "HF_TOKEN": "secret",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "1",
        "PATH": "/bin",
    }
    assert select_forwarded(environ).keys() == environ.keys() - {
        "HF_TOKEN",
        "CUDA_VISIBLE_DEVICES",
        "PATH",
    }
    agreed: dict[str, str] = dict.fromkeys(AGREED, "0")
    assert select_forwarded(agreed) == agreed


@pytest.mark.parametrize(
    ("several_hosts", "device_file", "cumem"),
    [
        (True, "channel0", "1"),
        (False, "channel0", "0"),
        (True, "", "0"),
        (True, "other", "0"),
    ],
)
def test_machines_that_nvlink_joins_let_nccl_take_it(
    several_hosts: bool, device_file: str, cumem: str, tmp_path: Path
) -> None:
    channels = tmp_path / "nvidia-caps-imex-channels"
    if device_file:
        channels.mkdir()
        (channels / device_file).touch()
    chosen = choose_agreed(several_hosts, channels)
    assert chosen == {"NCCL_CUMEM_ENABLE": cumem, "NCCL_NVLS_ENABLE": "0"}
    assert chosen.keys() == set(AGREED)


def test_differences_name_both_values() -> None:
    own = {"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring", "PATH": "/bin"}
    other = {"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5", "PATH": "/usr/bin"}
    assert differences(own, other) == {
        "NCCL_ALGO": "unset instead of 'Ring'",
        "NCCL_DEBUG": "'WARN' instead of 'INFO'",
        "NCCL_IB_HCA": "'mlx5' instead of unset",
    }
    assert differences(own, own) == {}


def test_what_ray_sets_in_its_workers_is_no_difference_unless_the_controller_set_it() -> None:
    assert differences({}, {"OMP_NUM_THREADS": "1"}) == {}
    assert "OMP_NUM_THREADS" in differences({"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(
    ("gpu_ids", "environ", "wanted"),
    [
        (("3", "5"), {}, [3, 5]),
        (("3", "5"), {"CUDA_VISIBLE_DEVICES": "2,3,4,5"}, [1, 3]),
        (("GPU-b",), {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, [1]),
        ((), {"CUDA_VISIBLE_DEVICES": "0"}, []),
    ],
)
def test_a_gpu_is_found_among_those_that_a_process_sees(
    gpu_ids: tuple[str, ...], environ: dict[str, str], wanted: list[int]
) -> None:
    assert local_indices(gpu_ids, environ) == wanted


def test_a_gpu_that_is_hidden_is_named() -> None:
    with pytest.raises(ValueError, match=r"CUDA_VISIBLE_DEVICES=0,1 hides GPU 4, which Ray"):
        local_indices(("4",), {"CUDA_VISIBLE_DEVICES": "0,1"})


def test_kernels_share_one_queue_only_under_tensor_parallelism() -> None:
    assert choose_queues(tp=2) == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert choose_queues(tp=1) == {}
    assert select_forwarded(choose_queues(tp=2)) == choose_queues(tp=2)


def test_sglang_gives_its_engines_eight_queues_also_where_ranks_have_one() -> None:
    """Weights that arrive in a single queue would wait for each decoding step."""
    found = find_spec("sglang")
    assert found is not None and found.origin is not None
    engine = Path(found.origin).parent / "srt" / "entrypoints" / "engine.py"
    assert 'os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"' in engine.read_text()


def test_graphs_are_released_where_sglang_can_and_refused_with_a_remedy_elsewhere() -> None:
    asked = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true"}
    assert can_release_graphs(asked) and not can_release_graphs({})
    saver = ["--enable-memory-saver"]
    with pytest.raises(ValueError, match=r"GRAPH=true: .*cuda_graph_backend_prefill to full or"):
        refuse_fixed_graphs(saver, asked)
    refuse_fixed_graphs([*saver, "--cuda-graph-backend-prefill", "full"], asked)
    refuse_fixed_graphs([*saver, "--disable-prefill-cuda-graph"], asked)
    refuse_fixed_graphs(saver, {})
    refuse_fixed_graphs([], asked)
