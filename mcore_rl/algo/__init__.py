"""Pure functions that turn rewards and log-probs into advantages and token losses."""
