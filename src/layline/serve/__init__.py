"""The OpenAI-compatible server: an application over the asynchronous engine, and its process."""
