"""The base model of the training service's tests."""

import logging

import pytest
import tiny

from nanochat.train_service.tenants import Base

logging.getLogger("tinker").setLevel(logging.ERROR)  # clients of servers that have ended complain for minutes

NAME = "tiny"
CONTEXT = 64


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    tokenizer = tiny.tiny_tokenizer()
    model = tiny.lively_model(tiny.tiny_config(vocab_size=tokenizer.vocab_size, sequence_len=CONTEXT))
    folder = tmp_path_factory.mktemp("base") / "checkpoints" / "sft" / NAME
    return Base(tiny.save_checkpoint(folder, 0, model, tokenizer, {"stage": "sft", "tasks": []}), tiny.cpu_device())
