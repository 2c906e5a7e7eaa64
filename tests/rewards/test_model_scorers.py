"""Requests to judge and reward model, how answers are read, and the cost of a failed one."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from mcore_rl.config import JudgeConfig, RewardConfig
from mcore_rl.rewards.model_scorers import JudgeScorer, RewardModelScorer
from mcore_rl.rewards.scorer import Scorer
from mcore_rl.tasks.arithmetic import make_tokenizer
from mcore_rl.types import Prompt, Sample, VersionSpan, WeightVersion


def make_sample(text: str, index: int = 0) -> Sample:
    messages = ({"role": "user", "content": "Ada has 12 {apples}"},)
    prompt = Prompt(index, (1,), messages, "unit", "12", {"hint": "count"})
    return Sample(prompt, 0, (5,), (-0.1,), "stop", (VersionSpan(0, 1, WeightVersion(0)),), text)


def chat(text: str | None) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}}]}


def test_the_judge_sees_prompt_response_and_ground_truth(tmp_path: Path) -> None:
    request = JudgeScorer(JudgeConfig(request={"seed": 7})).request(make_sample("{{ 7 }} {% x %}"))
    [message] = request.pop("messages")
    assert request == {"temperature": 0.0, "max_tokens": 1024, "seed": 7}
    for part in ("\nAda has 12 {apples}\n", "\n12\n", "\n{{ 7 }} {% x %}\n"):
        assert part in message["content"]
    own = tmp_path / "own.jinja"
    own.write_text("{{ data_source }} {{ extra_info.hint }} {{ messages | length }}")
    [message] = JudgeScorer(JudgeConfig(template=str(own))).request(make_sample("7"))["messages"]
    assert message["content"] == "unit count 1"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("It is right.\nVerdict: 1", 1.0),
        ("Verdict: 0\nno, wait\n**verdict:** 0.5.", 0.5),
        ("VERDICT: __1__", 1.0),
        ("Verdict: -1", "the judge's verdict is '-1'"),
        ("Verdict: 9", "the judge's verdict is '9'"),
        ("Verdict: good", "the judge's verdict is 'good'"),
        ("Verdict: nan", "the judge's verdict is 'nan'"),
        ("I would say 1", "no verdict in the judge's answer 'I would say 1'"),
        (None, "no verdict in the judge's answer ''"),
    ],
)
def test_the_last_verdict_counts_if_it_is_one(text: str | None, value: float | str) -> None:
    question = JudgeScorer(JudgeConfig())
    if not isinstance(value, str):
        assert question.read(chat(text)) == value
    else:
        with pytest.raises(ValueError, match=value):
            question.read(chat(text))


def test_verdicts_may_be_words() -> None:
    question = JudgeScorer(JudgeConfig(verdict=r"\b(yes|no)\b", words={"Yes": 1.0, "no": 0.25}))
    assert [question.read(chat(text)) for text in ("no ... yes", "no")] == [1.0, 0.25]
    with pytest.raises(ValueError, match=r"no chat: {}"):
        question.read({})


def test_what_cannot_be_asked_is_refused_before_a_run(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"verdict": "("}, r"reward.judge.verdict='\('"),
        ({"verdict": "a"}, "has 0 groups, needs one"),
        (
            {"words": {"good": 3.0}},
            r"reward.judge.words: good=3.0 lies outside reward.judge.low=0.0 to",
        ),
        ({"low": 1.0}, "reward.judge.low=1.0 is not below reward.judge.high=1.0"),
        ({"template": "none.jinja"}, "reward.judge.template=none.jinja: no such file"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            JudgeScorer(JudgeConfig(**options))
    bad = tmp_path / "bad.jinja"
    bad.write_text("{% if %}")
    with pytest.raises(ValueError, match=r"reward.judge.template=.*Expected an expression"):
        JudgeScorer(JudgeConfig(template=str(bad)))
    bad.write_text("{{ solution }}")
    with pytest.raises(ValueError, match="'solution' is undefined"):
        JudgeScorer(JudgeConfig(template=str(bad))).request(make_sample("7"))


def test_the_reward_model_gets_the_whole_chat_but_its_padding(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template += "<|pad|> <|pad|>"
    tokenizer.save_pretrained(tmp_path)
    settings: Any = {"num_labels": 1, "pad_token_id": 0}
    LlamaConfig(**settings).save_pretrained(tmp_path)
    tokens = RewardModelScorer(str(tmp_path)).tokens(make_sample("12 apples"))
    assert tokenizer.decode(tokens) == "<|user|> Ada has 12 <|pad|> <|assistant|> 12 apples <|end|>"
    settings["num_labels"] = 3
    LlamaConfig(**settings).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has 3 outputs \['LABEL_0'.*a reward is one number"):
        RewardModelScorer(str(tmp_path))
    question = RewardModelScorer.__new__(RewardModelScorer)
    assert question.read({"embedding": [0.5]}) == 0.5
    with pytest.raises(ValueError, match=r"is not one number: {\"embedding\": \[1, 2\]}"):
        question.read({"embedding": [1, 2]})


def test_parts_of_function_and_judge_are_summed_and_a_failed_judge_costs_its_sample(
    tmp_path: Path,
) -> None:
    function = tmp_path / "f.py"
    function.write_text(
        "def reward(*, data_source, solution_str, ground_truth, extra_info): return 2.0"
    )
    config = RewardConfig(path=str(function), parts=["score", "judge"], weights=[1.0, 10.0])

    async def post(path: str, bodies: Any) -> list[Any]:
        assert path == "/v1/chat/completions"
        await asyncio.sleep(0)
        texts = [body["messages"][0]["content"] for body in bodies]
        return [
            TimeoutError("late") if "late" in t else chat("Verdict: 1" * ("good" in t))
            for t in texts
        ]

    question = JudgeScorer(JudgeConfig())
    with Scorer(config, 100, {"judge": question}) as scorer:
        scorer.connect({"judge": post}, asyncio.run)
        scores = scorer([make_sample(text) for text in ("good", "late", "silent")])
    assert scores.outcomes() == [12.0] and scores.has_outcome_N == [True, False, False]
    assert scores.parts == {"score": [2.0] * 3, "judge": [1.0, 0.0, 0.0]}
    assert scores.errors == [
        "",
        "TimeoutError: late",
        "ValueError: no verdict in the judge's answer ''",
    ]
    with Scorer(RewardConfig(), 100, {"judge": question}) as scorer:
        scorer.connect({"judge": post}, asyncio.run)
        assert scorer([make_sample("good")]).rewards_N == [1.0]
    with pytest.raises(
        ValueError, match=r"each give rewards: .*reward.parts=\[score,judge\] reward.weights="
    ):
        Scorer(RewardConfig(path=str(function)), 100, {"judge": question})
    with pytest.raises(ValueError, match=r"reward.path is not set: .*judge.path=<folder>"):
        Scorer(RewardConfig(), 100)
