"""A recipe's options become the rules for images; models of text alone need none."""

import json
import shutil
from pathlib import Path

import pytest

from mcore_rl.config import Config, DataConfig, ImagesConfig, ModelConfig, RunConfig
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.run.images import (
    image_marks,
    image_prompts,
    model_with_images,
    patch_maker,
    sft_images,
)
from mcore_rl.run.prompts import PromptReader
from mcore_rl.tasks.arithmetic import prepare_arithmetic
from mcore_rl.tasks.shapes import prepare_shapes
from mcore_rl.weights.hf.config import ModelFacts


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    prepare_shapes(folder)
    return folder


def make_config(folder: Path, max_prompt_len: int = 64, **images: object) -> Config:
    data = DataConfig(
        train=[str(folder / "heldout.parquet")],
        max_prompt_len=max_prompt_len,
        images=ImagesConfig(**images),  # type: ignore[arg-type]
    )
    return Config(model=ModelConfig(path=str(folder / "model")), run=RunConfig(), data=data)


def test_prompts_carry_their_images(shapes: Path) -> None:
    config = make_config(shapes)
    tokenizer = load_tokenizer(shapes / "model", "model.path")
    prompts = PromptReader.make(config, tokenizer).load(config.data.train)
    assert len(prompts) == 256
    placeholder = ModelFacts.read(shapes / "model").config["image_token_id"]
    for prompt in prompts:
        [image] = prompt.images
        assert prompt.token_ids.count(placeholder) == image.num_tokens == 9
    assert len({prompt.images[0].digest for prompt in prompts}) == 256


def test_images_are_limited_and_shrunk_as_the_recipe_says(shapes: Path) -> None:
    tokenizer = load_tokenizer(shapes / "model", "model.path")
    small = PromptReader.make(make_config(shapes, max_tokens=4), tokenizer).load([_file(shapes)])
    assert {prompt.images[0].num_tokens for prompt in small} == {4}
    shrunk = PromptReader.make(make_config(shapes, 16, shrink=True), tokenizer).load(
        [_file(shapes)]
    )
    assert {prompt.images[0].num_tokens for prompt in shrunk} == {4}
    with pytest.raises(ValueError, match=r"none of 256 rows can be used: \{'overlong': 256\}"):
        PromptReader.make(make_config(shapes, 16), tokenizer).load([_file(shapes)])
    with pytest.raises(ValueError, match=r"heldout.parquet row 0, image 0 has 84 x 84 pixels"):
        PromptReader.make(make_config(shapes, max_pixels=84 * 84 - 1), tokenizer).load(
            [_file(shapes)]
        )
    with pytest.raises(ValueError, match=r"\{'bad': 256\}"):
        PromptReader.make(make_config(shapes, bad="skip", max_pixels=84 * 84 - 1), tokenizer).load(
            [_file(shapes)]
        )


def _file(shapes: Path) -> str:
    return str(shapes / "heldout.parquet")


def test_a_model_of_text_has_no_use_for_images(shapes: Path, tmp_path: Path) -> None:
    prepare_arithmetic(tmp_path)
    config = make_config(tmp_path)
    tokenizer = load_tokenizer(tmp_path / "model", "model.path")
    policy = ModelFacts.read(tmp_path / "model")
    assert model_with_images(config.model.path) is None
    assert patch_maker(config.data.images, policy) is None
    assert image_prompts(config.model.path, config.data, tokenizer, 64) is None
    assert sft_images(config.model.path, config.data, tokenizer, 64) is None
    with pytest.raises(ValueError, match=r"heldout.parquet row 0 has 1 `images`, but"):
        PromptReader.make(config, tokenizer).load([_file(shapes)])


@pytest.mark.parametrize(
    ("name", "marks"),
    [
        ("kimi_vl_a3b", (163605,)),
        ("kimi_k25", (163605,)),
        ("qwen2_5_vl_7b", (151652, 151655, 151656)),
        ("moonlight_16b_a3b", ()),
    ],
)
def test_placeholders_are_among_the_marks_of_images(name: str, marks: tuple[int, ...]) -> None:
    assert image_marks(ModelFacts.read(f"recipes/model/{name}")) == marks


def test_patches_of_another_model_are_refused(shapes: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(shapes, tmp_path / "shapes")
    path = folder / "model" / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "patch_size": 16}))
    tokenizer = load_tokenizer(folder / "model", "model.path")
    with pytest.raises(ValueError, match=r"preprocessor_config.json makes tokens of 4 patches"):
        PromptReader.make(make_config(folder), tokenizer).load([_file(folder)])


def test_patches_are_bounded_by_the_recipe(shapes: Path) -> None:
    policy = ModelFacts.read(shapes / "model")
    maker = patch_maker(ImagesConfig(cache_gib=0.5), policy)
    assert maker is not None and maker.cache_bytes == 2**29
    assert maker.folder == shapes / "model"


def test_images_are_not_streamed(shapes: Path) -> None:
    config = make_config(shapes)
    config.data.stream_above = 10
    tokenizer = load_tokenizer(shapes / "model", "model.path")
    with pytest.raises(ValueError, match=r"stream_above=10\), and model.path=.* sees images"):
        PromptReader.make(config, tokenizer).open_train(1)


def test_parts_that_see_no_images_refuse_them(shapes: Path) -> None:
    tokenizer = load_tokenizer(shapes / "model", "model.path")
    config = make_config(shapes)
    config.teacher.path = "teacher"
    with pytest.raises(ValueError, match=r"teacher.path=teacher with prompts that have images"):
        PromptReader.make(config, tokenizer).load([_file(shapes)])
    config = make_config(shapes)
    config.agents.environment = "command"
    with pytest.raises(ValueError, match=r"agents.environment=command with prompts that"):
        PromptReader.make(config, tokenizer).load([_file(shapes)])


def test_environments_get_the_images_of_prompts(shapes: Path) -> None:
    config = make_config(shapes)
    config.agents.environment = "tools"
    prompts = PromptReader.make(config, load_tokenizer(shapes / "model", "model.path")).load(
        [_file(shapes)]
    )
    assert all(len(prompt.images) == 1 for prompt in prompts)
