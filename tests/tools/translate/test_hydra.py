"""Options of another system are read from files, overrides and whole command lines."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mcore_rl.tools.translate.hydra import flatten, load_tree, parse_overrides, read_options


def test_a_configuration_is_resolved_and_overrides_win(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("a: {b: 1, c: '${a.b}', name: '???', empty: {}}\nlist: [1, 2]\n")
    options = read_options([str(file), "a.b=3", "+new.x=[y,z]", "~list"])
    assert options.is_whole
    wanted = {"a.b": 3, "a.c": 1, "a.name": None, "a.empty": {}, "list": None, "new.x": ["y", "z"]}
    assert options.given == wanted


def test_hydras_file_of_overrides_is_read(tmp_path: Path) -> None:
    file = tmp_path / "overrides.yaml"
    file.write_text("- a.b=2\n- '++c={d: 1e-6}'\n")
    options = read_options([str(file)])
    assert not options.is_whole
    assert options.given == {"a.b": 2, "c.d": 1e-6}


def test_the_rest_of_a_command_line_is_passed_over() -> None:
    own = "--config-name=ppo_megatron_trainer.yaml"
    line = ["-m", "verl.trainer.main_ppo", "--config-path=./config", own, "a=b"]
    assert read_options(line).given == {"a": "b"}
    assert read_options(line).config_name == "ppo_megatron_trainer"
    assert read_options(["--config-name", "ppo_trainer", "a=b"]).config_name == "ppo_trainer"
    assert read_options(["main_ppo_split.py", own, "a=b"]).given == {"a": "b"}
    launched = ["run", "--frozen", "--extra", "sglang", "python3", "-m", "verl.trainer.main_ppo"]
    assert read_options([*launched, "a=b"]).given == {"a": "b"}


def test_programs_that_are_not_translated_are_refused() -> None:
    for program, instead in (
        ("fsdp_sft_trainer", "mcore-rl sft"),
        ("main_generation", "mcore-rl eval"),
    ):
        line = ["--nnodes=1", "-m", f"verl.trainer.{program}", "data.train_files=a"]
        with pytest.raises(ValueError, match=f"verl.trainer.{program} is not .*{instead}"):
            read_options(line)


def test_the_configuration_that_a_command_line_names_is_read(tmp_path: Path) -> None:
    (tmp_path / "turns.yaml").write_text(
        "hydra: {searchpath: [file://verl/trainer/config]}\n"
        "defaults: [rollouts, _self_]\n"
        "data: {max_prompt_length: 1024, shuffle: false}\n"
        "actor_rollout_ref: {rollout: {multi_turn: {enable: true}, n: '${data.n}'}}\n"
    )
    (tmp_path / "rollouts.yaml").write_text(
        "defaults:\n- ppo_megatron_trainer\n- _self_\n"
        "actor_rollout_ref: {rollout: {n: 4, name: sglang}}\nlimit: '${data.n}'\n"
    )
    line = [f"--config-path={tmp_path}", "--config-name=turns", "data.shuffle=true", "limit=3"]
    options = read_options(line)
    assert options.config_name == "ppo_megatron_trainer" and not options.is_whole
    assert options.given == {
        "data.max_prompt_length": 1024,
        "data.shuffle": True,
        "actor_rollout_ref.rollout.multi_turn.enable": True,
        "actor_rollout_ref.rollout.name": "sglang",
        "limit": 3,
    }
    assert options.unreadable == {"actor_rollout_ref.rollout.n": "${data.n}"}


def test_a_configuration_that_is_not_there_is_not_passed_over(tmp_path: Path) -> None:
    message = (
        f"--config-name=turns: there is no {tmp_path}/turns.yaml, and what it sets would be lost"
    )
    with pytest.raises(ValueError, match=message):
        read_options(["--config-path", str(tmp_path), "--config-name", "turns", "a=b"])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("missing.yaml", "missing.yaml: there is no such file"),
        ("a=[", r"a=\[: neither a YAML file nor an override key=value"),
        ("--own-flag", "--own-flag: neither a YAML file nor an override"),
        ("run_qwen3.sh", r"run_qwen3.sh: .* is not read, but run .*; bash run_qwen3.sh"),
        ("words", "words: neither a YAML file nor an override"),
        ("main_ppo.py", "main_ppo.py: neither a YAML file nor an override"),
    ],
)
def test_what_cannot_be_read_is_named(argument: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_options([argument])


def test_a_file_that_is_no_configuration_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for text in ("a: ${nothing}\n", "a: [\n"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"run.yaml: no configuration in YAML"):
            read_options([str(file)])


def test_a_tree_keeps_what_is_to_be_computed(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("a: ${b}\nb: 1\n")
    tree = load_tree(file)
    assert OmegaConf.to_container(tree) == {"a": "${b}", "b": 1}
    with pytest.raises(ValueError, match=r"no.yaml: there is no such file, which x names"):
        load_tree(tmp_path / "no.yaml", ", which x names")


def test_nested_options_get_dotted_names() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": {}}}) == {"a.b.c": 1, "a.d": {}}
    assert parse_overrides(["a={b: {c: 1}}"]) == {"a.b.c": 1}


def test_a_configuration_is_looked_up_beside_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "recipe" / "dapo" / "config"
    folder.mkdir(parents=True)
    (folder / "turns.yaml").write_text("defaults: [ppo_trainer, _self_]\ndata: {seed: 3}\n")
    line = ["-m", "recipe.dapo.main_dapo", "--config-path=config", "--config-name=turns"]
    monkeypatch.chdir(tmp_path)
    assert read_options(line).given == {"data.seed": 3}
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=r"no config/turns.yaml nor recipe/dapo/config/turns.yaml"):
        read_options(line)
