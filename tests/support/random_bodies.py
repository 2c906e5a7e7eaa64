"""Random bodies of requests: the APIs' own words in places where they do not belong."""

import re

from hypothesis import strategies as st

NAMES = re.findall(
    r"\w[\w.]*",
    """
    type text role content messages input tools tool_choice function name arguments id
    call_id tool_calls tool_call_id tool_use_id output summary encrypted_content
    reasoning thinking system instructions stop stop_sequences max_tokens
    max_output_tokens n stream store include format response_format stream_options
    previous_response_id model parameters input_schema logprobs return_token_ids
    description reward turn
    """,
)
WORDS = re.findall(
    r"\w[\w.]*",
    """
    user assistant system tool text message function function_call function_call_output
    reasoning tool_use tool_result thinking input_text output_text auto none mcore_rl.e
    """,
)
SCALARS = st.none() | st.booleans() | st.integers(-9, 2**65) | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5)
    ),
    max_leaves=30,
)
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "tool", "system"]),
        "content": VALUES,
        "tool_calls": VALUES,
        "type": st.sampled_from(WORDS),
        "call_id": VALUES,
        "output": VALUES,
    },
)
BODIES = (
    VALUES
    | st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8)
    | st.fixed_dictionaries(
        {
            "messages": st.lists(MESSAGES, max_size=3),
            "input": st.lists(MESSAGES, max_size=3),
        },
        optional={"tools": VALUES, "stop": VALUES, "tool_choice": VALUES, "system": VALUES},
    )
)
