"""The server: continuous batching, OpenAI's API, and the chat page. Start reading at app.py."""
