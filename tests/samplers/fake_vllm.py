"""A server that answers as vLLM 0.32 did on a CPU, its failures included, with a model of transformers.

Statuses, messages and forms are what the real one has sent. As there:
- `reload_weights` loads the tensors of a folder in place. The head computes with a packed copy of its weights, which is
  packed again only where the folder has `lm_head.weight`: a tied head keeps its old weights otherwise.
- A prompt that was seen before is continued from its cached keys and values until /reset_prefix_cache drops them.
- A folder that is no model ends the engine: everything after it is status 500.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers", reason="the extra `dev` brings transformers")

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


class FakeVllm:
    """For `served` of test_samplers.py. `methods` are the worker's: vllm-ascend 0.23 has no reload_weights."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.dev_mode = True
        self.methods: tuple[str, ...] = ("reload_weights",)
        self.takes_path = True  # vLLM from 0.16 on
        self.loads = True  # False: it answers as if it had loaded the weights
        self.offset = 0.0  # of its log probabilities
        self.is_alive = True
        self.polls_down = 0  # it is restarting: this many requests for /v1/models find no server
        self.lives = 0
        self.is_busy = False  # a running request holds cached prompts
        # Called with the route of each request and its number among those to this route; may answer, or change this.
        self.accident: Callable[[FakeVllm, str, int], tuple[int, Any] | None] = lambda server, route, number: None
        self.headers: dict[str, str] = {}
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.start()

    def start(self) -> None:
        """As after a restart: with the weights of its folder."""
        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        self.model = model.eval()
        self.packed_head = model.lm_head.weight.detach().clone()
        self.cached: dict[tuple[int, ...], Any] = {}
        self.is_alive = True
        self.lives += 1

    def kill(self, polls_down: int = 2) -> None:
        """All its connections break, and it restarts."""
        self.polls_down = polls_down
        self.start()

    def reply(self, route: str, body: dict[str, Any]) -> tuple[int, Any]:
        life = self.lives
        self.requests.append((route, body))
        number = sum(one == route for one, _ in self.requests)
        answer = self.accident(self, route, number) or self.answer(route, body)
        if self.polls_down or life != self.lives:
            self.polls_down -= route == "/v1/models"
            return 0, {}
        return answer

    def answer(self, route: str, body: dict[str, Any]) -> tuple[int, Any]:
        if not self.is_alive:
            return 500, error(500, DEAD)
        if route == "/v1/models":
            context = self.model.config.max_position_embeddings
            return 200, {"object": "list", "data": [{"id": "fake", "owned_by": "vllm", "max_model_len": context}]}
        if route == "/v1/completions":
            return self.complete(body)
        if not self.dev_mode or route not in ("/collective_rpc", "/reset_prefix_cache"):
            return 404, {"detail": "Not Found"}
        if route == "/collective_rpc":
            return self.call(body["method"], body.get("kwargs", {}))
        if not self.is_busy:
            self.cached.clear()
        return 200, {"success": not self.is_busy}

    def call(self, method: str, kwargs: dict[str, Any]) -> tuple[int, Any]:
        wrong = ""
        if method not in self.methods:
            wrong = f"'Worker' object has no attribute '{method}'"
        elif not self.takes_path or set(kwargs) != {"weights_path"}:
            wrong = f"Worker.reload_weights() got an unexpected keyword argument '{min(kwargs)}'"
        elif not list(Path(kwargs["weights_path"]).glob("*.safetensors")):
            wrong = f"Cannot find any model weights with `{kwargs['weights_path']}`"
            self.is_alive = False
        if wrong:
            why = f"Call to collective_rpc method failed: Worker failed with error '{wrong}', please check the stack"
            return 500, error(500, why + " trace above for the root cause")
        if self.loads:
            self.load(Path(kwargs["weights_path"]))
        return 200, {"results": [None]}

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        if HEAD in tensors:
            self.packed_head = tensors[HEAD].clone()
        tensors.setdefault(HEAD, tensors[EMBEDDING])
        self.model.load_state_dict(tensors, strict=True)

    @torch.no_grad()
    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        prompt = body["prompt"]
        outside = [token for token in prompt if token >= self.model.config.vocab_size]
        if outside:
            return 400, error(400, f"Token id {outside[0]} is out of vocabulary")
        if len(prompt) + body["max_tokens"] > self.model.config.max_position_embeddings:
            limit = f"max_model_len={self.model.config.max_position_embeddings}"
            return 400, error(400, f"max_tokens={body['max_tokens']} cannot be greater than {limit}.")
        source = torch.Generator().manual_seed(body["seed"])
        known = tuple(prompt[:-1])
        if known and known not in self.cached:
            self.cached[known] = self.model.model(torch.tensor([known]), use_cache=True).past_key_values
        past = copy.deepcopy(self.cached.get(known))
        tokens: list[int] = []
        logprobs: list[float] = []
        last = prompt[-1]
        while len(tokens) < body["max_tokens"]:
            out = self.model.model(torch.tensor([[last]]), past_key_values=past, use_cache=True)
            past = out.past_key_values
            logp = (out.last_hidden_state[0, -1] @ self.packed_head.T / body["temperature"]).log_softmax(-1)
            last = int(torch.multinomial(logp.exp(), 1, generator=source))
            tokens.append(last)
            logprobs.append(logp[last].item() + self.offset)
            if last in body["stop_token_ids"]:
                break
        choice = {"index": 0, "text": "", "logprobs": {"token_logprobs": logprobs}, "token_ids": tokens}
        choice |= {"finish_reason": "length", "prompt_token_ids": prompt}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        return 200, {"choices": [choice], "system_fingerprint": "vllm-0.32.0-279070f0", "usage": usage}


def error(code: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "InternalServerError", "param": None, "code": code}}
