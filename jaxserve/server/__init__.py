"""The OpenAI-compatible HTTP server. Reaches the engine only through `AsyncLLM`."""
