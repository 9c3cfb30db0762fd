"""The folders that runs begin with are fixtures of every promise."""

from runs import base, home, pretrained, start, taught, tokenizer, trained_tokenizer, tutored  # noqa: F401 (fixtures)
