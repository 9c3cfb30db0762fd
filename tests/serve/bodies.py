"""Paths, and bodies that are right: the tests change them."""

KEY = "a-key-of-tests"
CONTEXT = 512
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
PROMPT = {"prompt": "x"}
BODIES = {CHAT: HELLO, COMPLETIONS: PROMPT}
