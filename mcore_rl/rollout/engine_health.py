"""Which engines get requests: what watch and weight sync learn about them goes in, the client asks."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineState:
    """How an engine fares; `restarts` counts the server processes that died before its present one."""

    url: str
    restarts: int = 0
    healthy: bool = True


class EngineHealth:
    """The engines that serve, and why the others don't. An engine started again waits for the next sync.

    `weights_stay`: it waits only until it is up, as it serves what it served before.
    """

    def __init__(self, urls: Sequence[str], weights_stay: bool = False) -> None:
        """All of `urls` serve, until something else is learnt."""
        self._weights_stay = weights_stay
        self._states = {url: EngineState(url) for url in urls}
        self._why_out = dict.fromkeys(urls, "")

    @property
    def states(self) -> list[EngineState]:
        return list(self._states.values())

    @property
    def serving(self) -> list[str]:
        return [url for url, reason in self._why_out.items() if not reason]

    def why_out(self, url: str) -> str:
        """Why the engine at `url` gets no requests; empty while it does."""
        return self._why_out[url]

    def note(self, states: Sequence[EngineState]) -> None:
        """Take in what the engines' watch saw: what a new process serves is not the current weights.

        Several may watch at once; what was seen of an earlier process counts for nothing.
        """
        for state in states:
            if state.restarts < self._states[state.url].restarts:
                continue
            if state.restarts > self._states[state.url].restarts:
                self._why_out[state.url] = "its server died and was started again"
                _log.warning("engine %s: %s", state.url, self._why_out[state.url])
            elif self._weights_stay and state.healthy and self._why_out[state.url]:
                self._why_out[state.url] = ""
                _log.info("engine %s serves again", state.url)
            self._states[state.url] = state

    def set_serving(self, urls: Collection[str], reasons: Mapping[str, str]) -> None:
        """From here on `urls` serve and no others; `reasons` says why not, where that is known."""
        for url, reason in self._why_out.items():
            if url in urls:
                self._why_out[url] = ""
                if reason:
                    _log.info("engine %s serves again", url)
            else:
                self._why_out[url] = (
                    reasons.get(url) or reason or "it does not hold the current weights"
                )
                if self._why_out[url] != reason:
                    _log.warning("engine %s is out of rotation: %s", url, self._why_out[url])
