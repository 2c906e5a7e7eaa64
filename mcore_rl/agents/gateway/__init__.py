"""An HTTP server that makes programs trainable which speak OpenAI's or Anthropic's API."""
