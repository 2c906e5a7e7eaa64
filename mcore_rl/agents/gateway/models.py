"""Reads off a request's `model` which adapter answers it, and lists what there is.

    model                 answered by
    ada, x:ada            the policy, by its own name
    policy, ""            the policy, whatever it is called
    base, x:base          the weights below the policy's factors
    another name          404, with the names that there are

A gateway whose engines serve weights alone takes any name for the policy.
"""

from collections.abc import Sequence
from typing import Any

from mcore_rl.agents.gateway.api import ApiError

POLICY = "policy"
"""Name that programs know the policy by if nobody tells them another."""
_SINCE = "2025-01-01T00:00:00Z"
_SINCE_S = 1735689600
_SHOWN_CHARS = 80


def choose_adapter(model: str, policy: str, adapters: Sequence[str]) -> str:
    """Return the name of the adapter that answers; "" stands for the policy.

    model      of the request; SGLang's "<model>:<adapter>" names an adapter, too
    policy     name of the policy
    adapters   what answers beside the policy; nothing: the policy answers to any name
    Raises ApiError, with all names, if nothing has this one.
    """
    name = model.rpartition(":")[2]
    if not adapters or name in ("", policy, POLICY):
        return ""
    if name not in adapters:
        served = ", ".join((policy, *adapters))
        shown = model if len(model) <= _SHOWN_CHARS else f"{model[:_SHOWN_CHARS]}..."
        raise ApiError(404, "model_not_found", f"no model is named {shown!r}: name one of {served}")
    return name


def make_model_list(models: Sequence[str]) -> dict[str, Any]:
    """Return a list of models, with the fields of OpenAI's and of Anthropic's."""
    entries = [
        {
            "id": model,
            "object": "model",
            "created": _SINCE_S,
            "owned_by": "mcore_rl",
            "type": "model",
            "display_name": model,
            "created_at": _SINCE,
        }
        for model in models
    ]
    ends = {"first_id": models[0], "last_id": models[-1], "has_more": False}
    return {"object": "list", "data": entries, **ends}
