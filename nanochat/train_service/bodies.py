"""The JSON bodies of the tinker client. Every field is checked; an unknown field is refused by name.

`read_body` of serve/schema.py turns bytes into one of them, or raises an `ApiError` that names the wrong field.
"""

import json
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field

from nanochat.ground.paths import PLAIN_NAME
from nanochat.sampling import SamplingParams
from nanochat.serve.schema import ApiError, Strict, Unsupported
from nanochat.tokenizer import Tokenizer
from nanochat.train_service.losses import find_loss
from nanochat.train_service.sampling import MAX_NUMBERS, SampleJob
from nanochat.train_service.store import EPHEMERAL
from nanochat.train_service.tenants import MAX_RANK, AdamBody, Trained
from nanochat.train_service.wire import MAX_TOPK, ForwardBackward


def _checked_name(name: str) -> str:
    if not PLAIN_NAME.fullmatch(name) or name.startswith(EPHEMERAL):
        raise ValueError("1 to 100 letters (a-z, A-Z), digits and _ . = + -, of which the last four not in front")
    return name


Name = Annotated[str, AfterValidator(_checked_name)]
Number = Annotated[int, Field(ge=0, lt=10**9)]
MAX_METADATA = 4096  # bytes of JSON: the server keeps it as long as the model


def _without_stability(value: Any) -> Any:
    if value:  # the first that a recipe with this loss asks for
        raise ValueError("it is for loss_fn=stable_reinforce, which is not here: choose loss_fn=importance_sampling")
    return value


def _small(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    if metadata is not None and len(json.dumps(metadata)) > MAX_METADATA:
        raise ValueError(f"at most {MAX_METADATA:,} bytes of JSON")
    return metadata


Metadata = Annotated[dict[str, Any] | None, AfterValidator(_small)]
MAX_SAMPLES = 1024  # in one request
MAX_PROMPT = 1 << 19  # tokens; the context is shorter
MAX_CHUNKS = 1024  # in a prompt
MAX_STOPS = 64
# `fail_fast` ends at the first wrong item: describing every one of 4 MiB of wrong ones took 6 s.
StopText = Annotated[str, Field(min_length=1, max_length=256)]
StopTexts = Annotated[list[StopText], Field(fail_fast=True, max_length=MAX_STOPS)]
StopIds = Annotated[list[int], Field(fail_fast=True, max_length=MAX_STOPS)]


class Body(Strict):
    type: str = ""  # the client names the body; the route has said the same


class ClientConfigBody(Strict):
    sdk_version: str


class CreateSessionBody(Body):
    tags: Annotated[list[str], Field(fail_fast=True, max_length=64)] = []
    user_metadata: dict[str, Any] | None = None  # not kept
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionBody(Body):
    session_id: str


class LoraBody(Strict):
    rank: Annotated[int, Field(ge=1, le=MAX_RANK)]
    seed: Annotated[int, Field(ge=0, lt=2**62)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(Strict):
    type: Literal["adamw"] = "adamw"


class CreateModelBody(Body):
    session_id: str
    model_seq_id: Number
    base_model: str
    user_metadata: Metadata = None
    lora_config: LoraBody | None = None  # none: the whole model is trained
    optimizer_config: OptimizerBody = OptimizerBody()


class LoadWeightsBody(Body):
    """The name of a model: its id, or for a new one its session and number."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: Number | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: Metadata = None
    optimizer_config: OptimizerBody | None = None
    weights_access_token: Unsupported = None


def trained_of(body: LoraBody) -> Trained:
    """The trained parts of a model. Raises ApiError: 400 when only the head would be trained."""
    if not body.train_attn and not body.train_mlp:
        raise ApiError(400, "train_unembed: set train_attn or train_mlp as well", param="lora_config")
    # Without a seed each model gets different adapters.
    seed = secrets.randbits(61) if body.seed is None else body.seed
    return Trained(body.rank, seed, body.train_attn, body.train_mlp, body.train_unembed)


class PathBody(Strict):
    tinker_path: str


class ModelBody(Body):
    model_id: str


class OptimStepBody(Body):
    model_id: str
    seq_id: Number | None = None
    adam_params: AdamBody


class SaveWeightsBody(Body):
    model_id: str
    seq_id: Number | None = None
    path: Name | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"  # an inflight sampler may keep its initial weights
    ttl_seconds: int | None = None  # not used: a checkpoint stays until it is deleted
    overwrite: bool = False
    user_metadata: Metadata = None


class CreateSamplerBody(Body):
    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class ChunkBody(Strict):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: Annotated[list[int], Field(fail_fast=True, max_length=MAX_PROMPT)]


class PromptBody(Strict):
    chunks: Annotated[list[ChunkBody], Field(fail_fast=True, max_length=MAX_CHUNKS)]


class SamplingBody(Strict):
    max_tokens: Annotated[int, Field(ge=0)] | None = None  # None: as many as fit the context
    seed: Annotated[int, Field(ge=0, lt=2**62)] | None = None
    stop: StopText | StopTexts | StopIds | None = None  # none: the tokenizer's end tokens; a list replaces them
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class SampleBody(Body):
    prompt: PromptBody
    sampling_params: SamplingBody
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    sampling_session_id: str
    seq_id: Annotated[int, Field(ge=0, lt=2**63)]
    base_model: str | None = None
    model_path: Unsupported = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOPK)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=MAX_TOPK)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    target_prompt_logprobs: Unsupported = None
    prompt_alt_tokens_k: Unsupported = 0
    record_stability_info: Annotated[Any, AfterValidator(_without_stability)] = None

    def job(self, tokenizer: Tokenizer, vocab_size: int, context: int) -> SampleJob:
        """Raises ApiError: 400 when the prompt does not fit, or names tokens that the model does not have."""
        params = self.sampling_params
        prompt = [token for chunk in self.prompt.chunks for token in chunk.tokens]
        room = context - len(prompt)
        # If the prompt's logprobs are requested, the prompt may fill the context: the sample is then empty.
        is_scored = bool(self.prompt_logprobs or self.topk_prompt_logprobs)
        longest = context if is_scored else context - 1
        if not 1 <= len(prompt) <= longest:
            raise ApiError(400, f"prompt: 1 to {longest} tokens, and this one has {len(prompt)}", param="prompt")
        require_tokens(prompt, vocab_size, "prompt")
        last = self.prompt_logprobs_last_n or 0
        if last >= len(prompt):
            message = f"prompt_logprobs_last_n {last}: less than the {len(prompt)} tokens of the prompt"
            raise ApiError(400, message, param="prompt_logprobs_last_n")
        stops: Sequence[Any] = [params.stop] if isinstance(params.stop, str) else params.stop or []
        stop_ids = [stop for stop in stops if isinstance(stop, int)]
        require_tokens(stop_ids, vocab_size, "stop")
        job = SampleJob(
            prompt,
            self.num_samples,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            sampling=SamplingParams(
                temperature=params.temperature,
                top_k=max(params.top_k, 0),
                top_p=params.top_p,
                seed=secrets.randbits(61) if params.seed is None else params.seed,
            ),
            stop_ids=tokenizer.stop_ids if params.stop is None else frozenset(stop_ids),
            stop_texts=tuple(stop for stop in stops if isinstance(stop, str)),
            topk=self.topk_sample_logprobs,
            prompt_logprobs=bool(self.prompt_logprobs),
            prompt_topk=self.topk_prompt_logprobs,
            prompt_last=last,
        )
        if job.numbers > MAX_NUMBERS:
            message = f"num_samples x max_tokens x (1 + 2 x topk_sample_logprobs) is {job.numbers:,}, at most "
            raise ApiError(400, f"{message}{MAX_NUMBERS:,}: ask in several requests", param="num_samples")
        return job


class FutureBody(Strict):
    request_id: str
    allow_metadata_only: bool = False


def require_tokens(tokens: "Sequence[int] | np.ndarray", vocab_size: int, what: str) -> None:
    """Raises ApiError: 400 when a token is not in the model's vocabulary."""
    ids = np.asarray(tokens, dtype=object if isinstance(tokens, list) else None)  # a list may hold any whole number
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ApiError(400, f"{what}: tokens from 0 to {vocab_size - 1}, and one is not", param=what)


def check_batch(request: ForwardBackward, vocab_size: int, context: int) -> None:
    """Raises ApiError or UserError: when a loss cannot be computed on a batch. It runs before the batch is logged."""
    loss, _ = find_loss(request.loss, request.settings)
    if not request.data:
        raise ApiError(400, "the request has no data", param="data")
    needed = {"target_tokens", *loss.inputs}
    several: tuple[int, ...] = ()  # for each token, the same in all data
    for place, datum in enumerate(request.data):
        length = len(datum.tokens)
        where = f"datum {place}: "
        if not 1 <= length <= context:
            raise ApiError(400, f"{where}1 to {context} tokens, and this one has {length}", param="model_input")
        if set(datum.inputs) - {"weights"} != needed:
            found = ", ".join(sorted(name[:50] for name in datum.inputs)) or "none"
            needs = ", ".join(sorted(needed))
            message = f"{where}{request.loss} takes {needs} and, if wanted, weights; loss_fn_inputs has {found}"
            raise ApiError(400, message, param="loss_fn_inputs")
        shape = datum.inputs["target_tokens"].shape
        if place == 0 and request.loss == "cross_entropy" and len(shape) == 2 and 1 <= shape[1] <= MAX_TOPK:
            several = shape[1:]
        expected = (length, *several)
        for name, values in datum.inputs.items():
            if values.shape != expected:
                message = f"{where}{name} has the shape {list(values.shape)[:8]}, and not {list(expected)}"
                raise ApiError(400, message, param=name)
            if not np.isfinite(values).all():
                raise ApiError(400, f"{where}{name} has a number that is not finite", param=name)
        require_tokens(datum.tokens, vocab_size, f"{where}model_input")
        targets = datum.inputs["target_tokens"].ravel()
        if not (targets == np.floor(targets)).all():
            raise ApiError(400, f"{where}target_tokens are not whole numbers", param="target_tokens")
        require_tokens(targets, vocab_size, f"{where}target_tokens")
