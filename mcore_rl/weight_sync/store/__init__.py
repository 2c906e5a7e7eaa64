"""A key-value store over TCP that only answers processes which know its key."""
