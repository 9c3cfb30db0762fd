"""Samples of RL from servers with OpenAI's API: ours (`chat_web --for_rl`), vLLM, vllm-ascend, SGLang.

    hand_over   rank 0 writes the weights to a folder that the servers can see, and makes each server load it
    sample      one request to /v1/completions per reply: token ids in, token ids and their logprobs out

A wrong sampler damages the policy without an error, so every reply is checked: the number of its tokens, their range,
the prompt's tokens as the server has read them, and the weights if the server names them. If a server refuses a request
for a while (429, 503), the next server gets it, with the same seed. Requests go only to servers that are ready: that
have the present weights. One that was lost, because it died or restarts, or that has other weights, is made ready while
the others sample. After `patience` seconds without a reply the run saves and ends. A reply may be hostile: it is read
without compression, up to 64 MiB, and any error of its reader becomes one line.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import torch

from nanochat.adapters.lora import SCALAR_HEAD, merged_weights
from nanochat.engine import ending
from nanochat.families import hf
from nanochat.gpt import GPT
from nanochat.ground import storage
from nanochat.ground.cli import Failed, Interrupted, UserError
from nanochat.ground.log import print0, warn
from nanochat.ground.paths import run_dir
from nanochat.ground.screen import Bar
from nanochat.ground.untrusted import json_of
from nanochat.ranks import decide_on_rank_zero, gather_values
from nanochat.rollout import ROWS_AT_ONCE, Reply
from nanochat.run import saver
from nanochat.run.stage import Start
from nanochat.samplers.agreement import check_agreement
from nanochat.sampling import NEUTRAL, SamplingParams

LOOK_SECONDS = 0.2  # between two checks whether the run has to stop
RETURN_SECONDS = 1.0  # between two attempts to make a server ready
CONNECT_SECONDS = 10.0
LONGEST_PAUSE = 10.0  # the longest time before a request is sent again
FOREIGN_SEEDS = 2**63  # vLLM's seeds are below this
MAX_REPLY = 64 << 20  # bytes; a million tokens with their logprobs take 30 MB
KINDS = ("nanochat", "sglang", "vllm")  # software of servers that can load weights


@dataclass
class Server:
    """The state of one server."""

    address: str  # http://HOST:PORT
    kind: str  # its software, from its /v1/models: nanochat, vllm, sglang
    model: str  # its name for the model
    at_once: int  # requests that it gets at the same time
    is_ready: bool = False  # it has the present weights, and gets requests
    is_lost: bool = False  # it does not answer


class TryAgain(Exception):
    """The server cannot reply now."""


class HttpSampler:
    """Samples from the servers of a --sampler flag; see `rollout.Sampler`. All ranks create it together and hand over
    together.

    Raises UserError: when a server does not answer, or cannot take these weights.
    """

    def __init__(self, config: Any, start: Start, should_stop: Callable[[], bool]):
        self.sampling = SamplingParams(temperature=config.temperature, top_k=config.top_k)  # for the probe
        self.tokenizer = start.tokenizer
        self.device = start.device
        self.folder = run_dir("rl", start.tag) / "weights"
        self.patience = config.sampler_patience
        self.should_stop = should_stop
        self.headers = {"accept-encoding": "identity"}
        if key := os.environ.get("NANOCHAT_API_KEY", ""):
            self.headers["authorization"] = f"Bearer {key}"
        self.is_checked = False
        self.trouble = ""  # the last problem of the present work
        self.weights = Path()  # the folder last handed over; its name identifies the weights
        if self.device.is_main:  # the copy of the weights is removed after the run
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        try:
            self.servers = [asyncio.run(self._find(address.rstrip("/"))) for address in config.sampler.split(",")]
        except Failed as error:
            raise UserError(str(error)) from error
        kinds = {server.kind for server in self.servers}
        if len(kinds) > 1:
            raise UserError(f"--sampler: one kind of server, these are {', '.join(sorted(kinds))}")
        self.kind = kinds.pop()
        self.vocab_size = start.model.config.vocab_size
        self.context = start.model.config.sequence_len
        self.family = None  # None: the weights are written in our checkpoint format
        if self.kind != "nanochat":
            self.family = hf.family_of(start.model.config)
            if self.family is None:
                raise UserError(
                    f"--sampler: {self.kind} does not compute models of our own shape; use chat_web --for_rl"
                )

    @staticmethod
    def check_flag(flag: str) -> None:
        """Raises UserError: when `--sampler flag` is not a list of addresses."""
        if not all(re.fullmatch(r"https?://[^/\s]\S*", address) for address in flag.split(",")):
            raise UserError(f"--sampler {flag}: the addresses of servers are http://HOST:PORT, with commas")

    async def _find(self, address: str) -> Server:
        try:
            async with self._client() as client:
                status, content = await self._fetch(client, f"{address}/v1/models", None, CONNECT_SECONDS)
        except (httpx2.TransportError, httpx2.InvalidURL) as error:
            raise Failed(f"--sampler {address}: {_words(error)}; is the server started?") from error
        if status != 200:
            hints = {
                401: "set NANOCHAT_API_KEY to its key",
                404: "it has no /v1/models, so it is not a server with OpenAI's API, as chat_web --for_rl is",
            }
            raise Failed(f"--sampler {address}: status {status}; {hints.get(status, 'look at its log')}")

        with _reading(address, "its /v1/models has not the form of OpenAI's API"):
            listed = json.loads(content)["data"][0]
            slots = listed.get("nanochat", {}).get("slots")
            # A few more than it has slots, so that none is free while a request is on its way.
            at_once = ROWS_AT_ONCE if slots is None else math.ceil(1.5 * slots / self.device.world_size)
            if not 0 < at_once < 100_000:
                raise ValueError("slots")
            server = Server(address, str(listed["owned_by"])[:100], str(listed["id"]), at_once)
        if server.kind not in KINDS:
            raise Failed(f"--sampler {address} is a server of {server.kind}: weights go to {', '.join(KINDS)}")
        return server

    # ------------------------------------------------------------------ weights

    def hand_over(self, model: GPT) -> None:
        """Sample with the model's present weights from now on. All ranks call it together, while none samples.

        Raises Failed: on all ranks, when a server refuses the weights, or no server takes them. The first time, when
        the run has nothing to save yet, raises UserError: also when a server computes other values than the trainer.
        """
        gather_values(None, self.device)  # wait until all ranks have their replies
        gathered = {}  # whole weights, on rank 0
        for name, weight in merged_weights(model):  # all ranks gather them, one at a time
            if self.device.is_main and name != SCALAR_HEAD:  # PPO's head, which samplers do not read
                gathered[name] = weight.cpu().contiguous()

        def write_and_tell() -> tuple[str, list[bool]]:
            self.weights = self._write(model, gathered)
            asyncio.run(self._tell_all())
            return str(self.weights), [server.is_ready for server in self.servers]

        try:
            weights, ready = decide_on_rank_zero(self.device, write_and_tell)
            self.weights = Path(weights)
            for server, is_ready in zip(self.servers, ready, strict=True):
                server.is_ready = is_ready
            if not self.is_checked:
                check_agreement(self, model, self.tokenizer, self.device, self.sampling)
        except (UserError, Failed) as error:
            raise (Failed if self.is_checked else UserError)(str(error)) from error
        self.is_checked = True
        if self.device.is_main:  # remove the folders of the previous step, and of a trainer that was killed
            for earlier in self.folder.glob("fp_*"):
                if earlier != self.weights:
                    shutil.rmtree(earlier, ignore_errors=True)

    def _write(self, model: GPT, gathered: dict[str, torch.Tensor]) -> Path:
        """Write a folder with the weights in the dtype of the products, which this process's engine would use too."""
        unfinished = self.folder / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        dtype = self.device.dtype
        if self.family is None:
            config = replace(model.config, scalar_head=False)
            weights = {name: tensor.to(dtype) for name, tensor in gathered.items()}
            about = {"step": 0, "stage": "rl"}
            files = saver.write_model(unfinished, config, weights, self.tokenizer, about)
        else:
            weights = dict(gathered)
            if self.kind == "vllm" and model.config.tied_head:
                # On a CPU vLLM computes a head from a packed copy of its weights, and packs them again only where the
                # folder has them: without this a tied model keeps the head of the start, and no message says so.
                weights["head.weight"] = weights["embedding.weight"]
            files = hf.write_weights(unfinished, model.config, weights.items(), dtype)
            settings = {**hf.from_config(model.config, self.family), "dtype": str(dtype).removeprefix("torch.")}
            files["config.json"] = storage.write_json(unfinished / "config.json", settings)
        hashes = [facts["sha256"] for name, facts in files.items() if name.endswith(".safetensors")]
        # A model in one file has its hash as its name, which our server compares. Large models are in several files,
        # and a step may change any of them.
        whole = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
        final = self.folder / f"fp_{whole[:12]}"
        saver.commit(unfinished, final, files)
        return final

    async def _tell_all(self) -> None:
        """Make all servers load the weights, except lost ones; at least one server must load them."""
        self.trouble = "no server takes the weights"
        for server in self.servers:
            server.is_ready = False
        deadline = time.monotonic() + self.patience
        async with self._client() as client:
            while not self.should_stop():  # the next sampling sees it, too
                # A lost server would delay the others; it gets the weights while they sample.
                called = [server for server in self.servers if not server.is_lost] or self.servers
                await asyncio.gather(*(self._make_ready(client, server) for server in called if not server.is_ready))
                is_late = time.monotonic() > deadline
                has_all = all(server.is_ready or server.is_lost for server in self.servers)
                if any(server.is_ready for server in self.servers) and (has_all or is_late):
                    return
                if is_late:
                    raise Failed(self._given_up())
                await asyncio.sleep(RETURN_SECONDS)

    async def _make_ready(self, client: httpx2.AsyncClient, server: Server) -> None:
        """Try once to make a server load the weights. Raises Failed: when it refuses them for good."""
        try:
            if server.is_lost:
                status, _ = await self._fetch(client, f"{server.address}/v1/models", None, CONNECT_SECONDS)
                if status != 200:
                    raise TryAgain(f"status {status}")
                server.is_lost = False
                print0(f"sampler: {server.address} is back")
            for route, body in _hand_over_requests(server.kind, self.weights):
                status, content = await self._fetch(client, server.address + route, body, self.patience)
                # A server that cannot load weights at the start of a run never will: do not wait for it.
                hint = "" if self.is_checked else HINTS.get((server.kind, status), "")
                what = f"does not take the weights in {self.weights}"
                _require(server, status, content, what, hint, is_final=status == 500 and not self.is_checked)
                if _is_refusal(content):
                    raise TryAgain(f"{route} has no success: requests are still running")
        except httpx2.TransportError as error:
            self._lose(server, error)
        except TryAgain as error:
            self.trouble = f"{server.address}: {error}"
        else:
            server.is_ready = True

    def _lose(self, server: Server, error: httpx2.TransportError) -> None:
        self.trouble = f"{server.address}: {_words(error)}"
        server.is_ready = False  # it may come back with its initial weights
        if server.is_lost:
            return
        server.is_lost = True
        what = "its requests go to the others"
        if all(one.is_lost for one in self.servers):
            what = f"it is asked again for up to {self.patience:g} s (--sampler_patience)"
        # `warn` prints on rank 0 only: every rank uses all servers.
        warn(f"sampler: {server.address} is lost ({_words(error)}): {what}")

    def _client(self) -> httpx2.AsyncClient:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx2.AsyncClient(headers=self.headers, limits=limits)

    async def _fetch(
        self, client: httpx2.AsyncClient, address: str, body: dict[str, Any] | None, seconds: float
    ) -> tuple[int, bytes]:
        """The status and the whole content of the reply to a request; without a body it is a GET.

        Raises Failed: when it is too large. Raises TransportError: when it has not arrived in time, as for whatever
        happens to the connection.
        """

        # Not by asyncio.wait_for: before Python 3.12 it can swallow the cancellation of its caller.
        deadline = time.monotonic() + seconds
        timeout = httpx2.Timeout(seconds, connect=CONNECT_SECONDS)
        content = bytearray()
        method = "GET" if body is None else "POST"
        async with client.stream(method, address, json=body, timeout=timeout) as response:
            async for part in response.aiter_raw():  # as it is: gzip makes 6 GB of 3 MB
                content += part
                if len(content) > MAX_REPLY:
                    raise Failed(f"--sampler {address}: a reply of more than {MAX_REPLY >> 20} MiB")
                if time.monotonic() > deadline:
                    raise httpx2.ReadTimeout(f"no whole reply within {seconds:g} s")
            return response.status_code, bytes(content)

    def _given_up(self) -> str:
        return (
            f"--sampler {self.trouble}; no reply for {self.patience:g} s (--sampler_patience): start it again, or name "
            "another one"
        )

    # ------------------------------------------------------------------ replies

    def __call__(
        self, prompts: Sequence[Sequence[int]], settings: Sequence[SamplingParams], max_tokens: int
    ) -> list[Reply]:
        return asyncio.run(self._sample(prompts, settings, max_tokens))

    async def _sample(
        self, prompts: Sequence[Sequence[int]], settings: Sequence[SamplingParams], max_tokens: int
    ) -> list[Reply]:
        gates = [asyncio.Semaphore(server.at_once) for server in self.servers]
        self.trouble = "no server replies"
        last_reply = time.monotonic()
        left: set[int] = set()  # servers whose requests have gone to others

        async def ask(number: int, client: httpx2.AsyncClient) -> Reply:
            nonlocal last_reply
            # Neighbours are samples of one question: they go to the servers in turn, as do the attempts of one request.
            for attempt in itertools.count():
                ready = [place for place, server in enumerate(self.servers) if server.is_ready]
                if not ready:
                    await asyncio.sleep(LOOK_SECONDS)
                    continue
                place = ready[(number + self.device.rank + attempt) % len(ready)]
                server = self.servers[place]
                try:
                    async with gates[place]:
                        if server.is_ready:  # also after this request has waited for its turn
                            return await self._reply(client, server, prompts[number], settings[number], max_tokens)
                except httpx2.TransportError as error:
                    self._lose(server, error)
                    # It may have been silent for `patience`: give the other servers the same time once.
                    if place not in left and not all(one.is_lost for one in self.servers):
                        left.add(place)
                        last_reply = time.monotonic()
                except TryAgain as error:
                    self.trouble = f"{server.address}: {error}"
                    await asyncio.sleep(min(LONGEST_PAUSE, 0.25 * 2 ** min(attempt, 8)))
            raise AssertionError("unreachable")

        async def keep_ready(server: Server, client: httpx2.AsyncClient) -> None:
            while True:
                if not server.is_ready:
                    await self._make_ready(client, server)
                await asyncio.sleep(LOOK_SECONDS if server.is_ready else RETURN_SECONDS)

        async with self._client() as client:
            keepers: list[asyncio.Task[Any]] = [
                asyncio.create_task(keep_ready(server, client)) for server in self.servers
            ]
            tasks = [asyncio.create_task(ask(number, client)) for number in range(len(prompts))]
            try:
                with Bar("replies", len(tasks)) as progress:
                    pending: set[asyncio.Task[Any]] = set(tasks)
                    while pending:
                        done, _ = await asyncio.wait(
                            {*pending, *keepers}, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED
                        )
                        for task in done:
                            task.result()  # raises what the task has raised; a keeper ends in no other way
                            progress.done += 1
                            last_reply = time.monotonic()
                        pending -= done
                        if self.should_stop():
                            raise Interrupted
                        # The timeout of a request ends first.
                        if time.monotonic() - last_reply > self.patience + LOOK_SECONDS:
                            raise Failed(self._given_up())
            finally:
                for task in (*keepers, *tasks):
                    task.cancel()  # the server then gives the slot to another request
                await asyncio.gather(*keepers, *tasks, return_exceptions=True)
        return [task.result() for task in tasks]

    async def _reply(
        self, client: httpx2.AsyncClient, server: Server, prompt: Sequence[int], params: SamplingParams, max_tokens: int
    ) -> Reply:
        """One reply of the present weights. Raises Failed: when it is wrong."""
        body = self._request(server, prompt, params, max_tokens)
        status, content = await self._fetch(client, f"{server.address}/v1/completions", body, self.patience)
        _require(server, status, content, "refuses a request")
        what = "a reply without token_ids or logprobs; it needs the field return_token_ids of vLLM 0.16"
        with _reading(server.address, what):
            reply, weights = self._read(server, content, prompt, max_tokens)
        if weights not in ("", self.weights.name):
            server.is_ready = False
            raise TryAgain(f"the weights {weights} instead of {self.weights.name}: does another trainer use it?")
        return reply

    def _request(
        self, server: Server, prompt: Sequence[int], params: SamplingParams, max_tokens: int
    ) -> dict[str, Any]:
        # Send all settings, including neutral ones: a missing setting takes the server's default.
        body = {name: getattr(params, name) for name in NEUTRAL}
        body |= {"model": server.model, "prompt": list(prompt), "seed": params.seed}
        body |= {"max_tokens": min(max_tokens, self.context - len(prompt))}
        body |= {"logprobs": 0, "return_token_ids": True}
        if server.kind != "nanochat":
            body["seed"] = params.seed % FOREIGN_SEEDS
            body["top_k"] = params.top_k or -1
            body["stop_token_ids"] = sorted(self.tokenizer.stop_ids)
        return body

    def _read(self, server: Server, content: bytes, prompt: Sequence[int], max_tokens: int) -> tuple[Reply, str]:
        """The reply, and the weights that sampled it if the server names them.

        Raises Failed: for what is wrong in the reply. Raises whatever its form makes it raise.
        """
        body = json.loads(content)
        choices = body["choices"]
        choice = choices[0]
        tokens = list(choice["token_ids"])
        logprobs = list(choice["logprobs"]["token_logprobs"])
        read = choice.get("prompt_token_ids") or body.get("prompt_token_ids") or list(prompt)
        prompt_tokens = (body.get("usage") or {}).get("prompt_tokens", len(prompt))
        weights = (body.get("metadata") or {}).get("weight_version") or ""
        if server.kind == "nanochat":
            weights = body["system_fingerprint"]
        wrong = ""
        if len(choices) != 1:
            wrong = f"{len(choices)} replies instead of 1"
        elif not 0 < len(tokens) <= max_tokens or len(logprobs) != len(tokens):
            wrong = f"{len(tokens)} tokens with {len(logprobs)} logprobs, of at most {max_tokens}"
        elif prompt_tokens != len(prompt) or read != list(prompt):
            wrong = f"it has read other tokens than the {len(prompt)} of the prompt: it has another tokenization"
        elif not all(type(token) is int and 0 <= token < self.vocab_size for token in tokens):
            wrong = f"token ids outside of the vocabulary of {self.vocab_size}: it has another model"
        elif not all(logp is None or _is_logprob(logp) for logp in logprobs):
            wrong = "logprobs that are not logarithms of probabilities"
        if wrong:
            raise Failed(f"--sampler {server.address}: {wrong}")
        # The calculator's answers have no logprob: the policy did not choose them.
        mask = [int(logp is not None) for logp in logprobs]
        how = ending(tokens, mask, self.tokenizer)
        reply = Reply(list(tokens), mask, [0.0 if logp is None else float(logp) for logp in logprobs], how)
        return reply, str(weights)[:100]


def _hand_over_requests(kind: str, weights: Path) -> list[tuple[str, dict[str, Any]]]:
    """The requests that make a kind of server load the weights of a folder: routes with their bodies, in order."""
    # vLLM's route is one for development (VLLM_SERVER_DEV_MODE=1). A second request drops the keys and values of cached
    # prompts, which are of the old weights. Tried with vLLM 0.32 on a CPU.
    if kind == "vllm":
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
        return [("/collective_rpc", body), ("/reset_prefix_cache", {})]
    return [("/update_weights_from_disk", {"model_path": str(weights), "weight_version": weights.name})]


# What a server's first answer to them may mean, by its kind and its status.
HINTS = {
    ("vllm", 404): "vLLM has this route only with VLLM_SERVER_DEV_MODE=1",
    ("vllm", 500): (
        "vLLM loads a folder from version 0.16 on, vllm-ascend 0.23 with the extension in docs/rl.md, and both must be "
        "able to read this folder"
    ),
}


@contextlib.contextmanager
def _reading(address: str, what: str) -> Iterator[None]:
    """Raises Failed: in one line, for whatever a server's reply makes its reader raise."""
    try:
        yield
    except Failed:
        raise
    except Exception as error:  # no list is complete: RecursionError, OverflowError, UnicodeDecodeError
        raise Failed(f"--sampler {address}: {what} ({_words(error)})") from error


def _is_logprob(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value <= 1e-3


def _require(server: Server, status: int, content: bytes, what: str, hint: str = "", *, is_final: bool = False) -> None:
    """Raises TryAgain: when the server is busy or restarts. Raises Failed: when it refuses, or this `is_final`."""
    if 200 <= status < 300:
        return
    message = content.decode(errors="replace")
    with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
        message = str(json.loads(message)["error"]["message"])
    message = " ".join(message.split())  # vLLM's may have several lines
    if (status in (408, 429) or status >= 500) and not is_final:
        raise TryAgain(f"status {status} {message[:200]}".rstrip())
    after = f"; {hint}" if hint else ""
    raise Failed(f"--sampler {server.address} {what} (status {status}): {message[:300]}{after}")


def _is_refusal(content: bytes) -> bool:
    """Whether vLLM says that it has not dropped its cached prompts, with status 200: a running request holds them."""
    answer = json_of(content)
    return isinstance(answer, dict) and answer.get("success") is False


def _words(error: BaseException) -> str:
    """The error's message, or its type: some errors of the client have no message."""
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
