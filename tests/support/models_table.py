"""The table of docs/models.md, as tests measured it: `pytest TESTS --models-table docs/models.md`.

A cell that the run did not measure stays as it is; a test measures when all else is well.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

BEGIN, END = "<!-- table: written by --models-table -->", "<!-- end of table -->"
HEAD = (
    "`architectures`",
    "Models",
    "Megatron and transformers",
    "SGLang and transformers",
    "A step of GRPO",
)
MEGATRON, SGLANG, RUN = range(2, 5)
"""Columns that tests fill."""

SHORT = {"attention_dp": "DP"}
MODELS = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3-30B-A3B, Qwen3-235B-A22B"),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B"),
    "mixtral": ("MixtralForCausalLM", "Mixtral-8x7B, 8x22B"),
    "olmoe": ("OlmoeForCausalLM", "OLMoE-1B-7B"),
    "glm4_moe": ("Glm4MoeForCausalLM", "GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7"),
    "minimax_m2": ("MiniMaxM2ForCausalLM", "MiniMax-M2, M2.5"),
    "gpt_oss": ("GptOssForCausalLM", "gpt-oss-20b, gpt-oss-120b"),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepSeek-V3, R1"),
    "moonlight": ("DeepseekV3ForCausalLM", "Moonlight-16B-A3B"),
    "kimi_k2": ("DeepseekV3ForCausalLM", "Kimi-K2"),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", "GLM-4.7-Flash"),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepSeek-V2-Lite"),
    "deepseek_v32": ("DeepseekV32ForCausalLM", "DeepSeek-V3.2"),
    "glm5": ("GlmMoeDsaForCausalLM", "GLM-5, GLM-5.1"),
    "hunyuan_v3": ("HYV3ForCausalLM", "Hy3-preview"),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3-Next-80B-A3B"),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3.5, 3.6, dense, text alone"),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3.5, 3.6, experts, text alone"),
    "nemotron3": ("NemotronHForCausalLM", "Nemotron-3-Nano-30B-A3B"),
    "nemotron3_latent": ("NemotronHForCausalLM", "Nemotron-3-Super-120B-A12B"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3 0.6B to 32B"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2, Qwen2.5"),
    "llama": ("LlamaForCausalLM", "Llama 2, 3"),
}
"""Kind of tiny model -> its architecture, and the published models that have its settings."""

_measured: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)


def label(sizes: Mapping[str, int]) -> str:
    """{"tp": 2, "ep": 2} -> "TP2 EP2"."""
    return (
        " ".join(f"{SHORT.get(key, key.upper())}{size}" for key, size in sizes.items())
        or "one rank"
    )


def record(kind: str, column: int, sizes: Mapping[str, int], error: float) -> None:
    """The largest difference between log-probs, in ranks of these sizes."""
    found = _measured[kind, column]
    found[label(sizes)] = max(error, found.get(label(sizes), 0.0))


def write(path: Path) -> None:
    """Into `path`, between its two marks."""
    text = path.read_text()
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    rows = read_rows(old)
    for kind in MODELS:
        row = rows.setdefault(kind, [*MODELS[kind], *[""] * (len(HEAD) - 2)])
        row[:2] = [MODELS[kind][0], MODELS[kind][1]]
        for column in (MEGATRON, SGLANG, RUN):
            if found := _measured.get((kind, column)):
                row[column] = f"{', '.join(found)}: {max(found.values()):.0e}"
    lines = [
        _line(HEAD),
        _line(["---"] * len(HEAD)),
        *(_line(cell or "-" for cell in rows[kind]) for kind in MODELS),
    ]
    path.write_text("\n".join([before + BEGIN, *lines, END + after]))


def read_rows(table: str) -> dict[str, list[str]]:
    """Kind -> cells; the kinds are those of the models named."""
    kinds = {models: kind for kind, (_, models) in MODELS.items()}
    lines = table.strip().splitlines()[2:]
    cells = ([cell.strip(" -") for cell in line.split("|")[1:-1]] for line in lines)
    return {kinds[row[1]]: row for row in cells if row[1] in kinds}


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
