"""The keys of the engines that tests start, as a run makes them for its own."""

from mcore_rl.process.server_keys import ServerKeys

KEYS = ServerKeys.make()
