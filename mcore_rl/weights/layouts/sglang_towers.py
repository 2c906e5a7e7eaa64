"""How SGLang 0.5.23's vision towers are cut, and what its models do otherwise with them.

Every pipeline stage has a whole vision tower:

    qkv of 2 ranks, 3 blocks of rows      q0 k0 v0 | q1 k1 v1
    MLP of width 44, a multiple of 8      rows 0-23 | rows 24-43, 4 rows of zeros

Source: srt/models/{qwen2_5_vl,glm4v,qwen3_vl,qwen3_vl_moe,qwen3_5,kimi_vl_moonvit,kimi_k25}.py and
srt/layers/attention/vision.py. tests/scenarios/rollout compares all of it with SGLang itself.
"""

from collections.abc import Iterator, Mapping

from mcore_rl.weights.layouts.layout import COLUMNS, WHOLE, EngineRule
from mcore_rl.weights.layouts.tensors import Entry, cut_evenly, cut_padded
from mcore_rl.weights.models import tower
from mcore_rl.weights.models.table import HfConfig, Shape
from mcore_rl.weights.models.tower import read_vision_settings

VOCAB_MULTIPLE = 64
"""SGLang pads the rows of an embedding to a multiple of so many."""

QWEN2_5_TOWER: Mapping[str, EngineRule] = {
    "patch_embed.proj": WHOLE,
    "blocks.norm1": WHOLE,
    "blocks.norm2": WHOLE,
    "blocks.attn.qkv": EngineRule("attention", blocks=3),
    "blocks.attn.proj": EngineRule("attention", COLUMNS),
    "blocks.mlp.gate_proj": EngineRule("tensor", multiple=8),
    "blocks.mlp.up_proj": EngineRule("tensor", multiple=8),
    "blocks.mlp.down_proj": EngineRule("tensor", COLUMNS, multiple=8),
    "merger.ln_q": WHOLE,
    "merger.mlp.0": EngineRule("tensor"),
    "merger.mlp.2": EngineRule("tensor", COLUMNS),
}
GLM4_TOWER: Mapping[str, EngineRule] = {
    "patch_embed.proj": WHOLE,
    "embeddings.position_embedding": WHOLE,
    "post_conv_layernorm": WHOLE,
    "blocks.norm1": WHOLE,
    "blocks.norm2": WHOLE,
    "blocks.attn.qkv": EngineRule("attention", blocks=3),
    "blocks.attn.proj": EngineRule("attention", COLUMNS),
    "blocks.mlp.gate_proj": EngineRule("attention"),
    "blocks.mlp.up_proj": EngineRule("attention"),
    "blocks.mlp.down_proj": EngineRule("attention", COLUMNS),
    "post_layernorm": WHOLE,
    "downsample": WHOLE,
    "merger.proj": WHOLE,
    "merger.post_projection_norm": WHOLE,
    "merger.gate_proj": EngineRule("attention"),
    "merger.up_proj": EngineRule("attention"),
    "merger.down_proj": EngineRule("attention", COLUMNS),
}
QWEN3_TOWER: Mapping[str, EngineRule] = {
    "patch_embed.proj": WHOLE,
    "pos_embed": EngineRule("attention", multiple=VOCAB_MULTIPLE, is_first=True),
    "blocks.norm1": WHOLE,
    "blocks.norm2": WHOLE,
    "blocks.attn.qkv": EngineRule("attention", blocks=3),
    "blocks.attn.proj": EngineRule("attention", COLUMNS),
    "blocks.mlp.linear_fc1": EngineRule("attention"),
    "blocks.mlp.linear_fc2": EngineRule("attention", COLUMNS),
    "merger.norm": WHOLE,
    "merger.linear_fc1": EngineRule("attention"),
    "merger.linear_fc2": EngineRule("attention", COLUMNS),
    "deepstack_merger_list.norm": WHOLE,
    "deepstack_merger_list.linear_fc1": EngineRule("attention"),
    "deepstack_merger_list.linear_fc2": EngineRule("attention", COLUMNS),
}
MOONVIT: Mapping[str, EngineRule] = {
    "patch_embed.proj": WHOLE,
    "patch_embed.pos_emb": WHOLE,
    "blocks.norm0": WHOLE,
    "blocks.norm1": WHOLE,
    "blocks.wqkv": EngineRule("attention", blocks=3),
    "blocks.wo": EngineRule("attention", COLUMNS),
    "blocks.mlp.fc0": EngineRule("attention"),
    "blocks.mlp.fc1": EngineRule("attention", COLUMNS),
    "final_layernorm": WHOLE,
    "merger.pre_norm": WHOLE,
    "merger.linear_1": WHOLE,
    "merger.linear_2": WHOLE,
}
MOONVIT_3D: Mapping[str, EngineRule] = {
    **MOONVIT,
    "blocks.mlp.fc0": WHOLE,
    "blocks.mlp.fc1": WHOLE,
}
KIMI_VL = "KimiVLForConditionalGeneration"
KIMI_K25 = "KimiK25ForConditionalGeneration"
QWEN3 = "Qwen3VLForConditionalGeneration"
QWEN3_MOE = "Qwen3VLMoeForConditionalGeneration"
QWEN3_5 = "Qwen3_5ForConditionalGeneration"
QWEN3_5_MOE = "Qwen3_5MoeForConditionalGeneration"
TOWER_RULES: Mapping[str, Mapping[str, EngineRule]] = {
    "Qwen2_5_VLForConditionalGeneration": QWEN2_5_TOWER,
    "Glm4vMoeForConditionalGeneration": GLM4_TOWER,
    QWEN3: QWEN3_TOWER,
    QWEN3_MOE: QWEN3_TOWER,
    QWEN3_5: QWEN3_TOWER,
    QWEN3_5_MOE: QWEN3_TOWER,
    KIMI_VL: MOONVIT,
    KIMI_K25: MOONVIT_3D,
}
"""Architecture -> module of its tower, without the block's number -> how it is cut."""


DEEPSTACK = "deepstack_visual_indexes"
DEEPSTACK_LAYERS = 3
"""Layers that take features of the tower in SGLang's Qwen3-VL with experts, built in."""


TOWER_EPSILON = 1e-6
"""Epsilon of the norms in transformers' tower of Qwen3-VL, built in."""


def find_tower_problems(
    hf_config: HfConfig, architecture: str, family_sizes: Mapping[str, int], pp: int
) -> Iterator[tuple[str, str]]:
    """Yield (setting, problem) for what SGLang's model does otherwise with a tower.

    pp   pipeline stages of an engine
    """
    epsilon = hf_config.get("rms_norm_eps", TOWER_EPSILON)
    if TOWER_RULES.get(architecture) is QWEN3_TOWER and epsilon != TOWER_EPSILON:
        problem = f"takes it for the norms of the tower as well, which have {TOWER_EPSILON}"
        yield f"rms_norm_eps = {epsilon}", problem
    if architecture in (QWEN3_5, QWEN3_5_MOE) and DEEPSTACK not in read_vision_settings(hf_config):
        problem = "adds features of inner blocks, which the model lacks: write an empty list"
        yield f"no {DEEPSTACK!r} in vision_config", problem
    needed = family_sizes.get("deepstack_mergers", 0)
    if architecture == QWEN3_MOE and needed != DEEPSTACK_LAYERS:
        setting = f"{DEEPSTACK} with {needed} entries"
        yield setting, f"adds features of the tower behind {DEEPSTACK_LAYERS} layers"
    on_first = family_sizes["layers"] // pp
    if on_first < needed:
        problem = f"has only {on_first} of the {needed} layers that take features of the tower"
        yield f"pp = {pp}", problem + " on the first stage, and does not send them on"


def find_tower_rule(architecture: str, entry: Entry) -> EngineRule | None:
    """Return how a tower's tensor is cut; None for other tensors, or if it is not recorded."""
    if not entry.rule.key.startswith(tower.PREFIX):
        return None
    module = entry.rule.key.removeprefix(tower.PREFIX).rpartition(".")[0]
    return TOWER_RULES.get(architecture, {}).get(module)


def cut_tower(
    shape: Shape, rule: EngineRule, parts: int, where: str
) -> list[list[tuple[Shape, Shape]]]:
    """Return the boxes (start, stop) of each of `parts`; none of a part that is all padding.

    Raises ValueError naming the two numbers if blocks and parts do not divide; `where` names the
    tensor in it.
    """
    if rule.blocks == 1:
        cuts = cut_padded(shape, rule.axis, rule.multiple, parts, where)
        return [[box] if box else [] for box in cuts]
    pieces = cut_evenly(shape, rule.axis, rule.blocks * parts, where)
    return [pieces[part::parts] for part in range(parts)]
