"""The unmodified tinker client trains and samples here, and its numbers are those of the core.

One tiny model serves all tests, in this process and on a real socket.
"""

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tiny
import torch
from service_clients import (
    CONTEXT,
    IDS,
    NAME,
    PROTO,
    assert_same,
    base_model,
    client_of,
    datum,
    live_model,
    lora_client,
    mistake_of,
    numbers,
    rest_of,
    serving,
    tinker,
    train,
    trained_weights,
    weights_of,
)

from nanochat.adapters.folders import read_adapters
from nanochat.engine import Engine, SamplingParams
from nanochat.train_service import app as service_app
from nanochat.train_service import service as service_module
from nanochat.train_service.losses import TOKEN_LOSSES
from nanochat.train_service.service import Limits, Service
from nanochat.train_service.tenants import Trained

ADAM = {"learning_rate": 0.01, "beta1": 0.8, "beta2": 0.9, "eps": 1e-2, "weight_decay": 0.1, "grad_clip_norm": 2.0}


# ---------------------------------------------------------------------- a server and its clients


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return Service(base_model(), tmp_path_factory.mktemp("service"), NAME, Limits(batch_tokens=16, snapshot_steps=3))


@pytest.fixture(scope="module")
def address(service: Service) -> Iterator[str]:
    with serving(service) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Any:
    return client_of(address)


def batch_of(loss: str) -> list[Any]:
    """Data for a loss, with ratios on both sides of a clip."""
    if loss == "cross_entropy":
        return [datum(ids, weights=numbers(ids, place)) for place, ids in enumerate(IDS)]
    data = []
    for place, ids in enumerate(IDS):
        given = {"logprobs": np.array(numbers(ids, place)) / 2 - 6, "advantages": numbers(ids, place + 10)}
        if loss == "gspo":
            given["sequence_ratio_mask"] = [0] + [1] * (len(ids) - 2)
        else:
            given["weights"] = numbers(ids, place + 20)
        data.append(datum(ids, **given))
    return data


def live_weights(service: Service, training: Any) -> dict[str, torch.Tensor]:
    return weights_of(service, training.model_id)


def assert_same_gradients(service: Service, training: Any, model: Any) -> None:
    expected = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
    live = live_model(service, training.model_id)
    found = {name: one.grad for name, one in live.named_parameters() if one.requires_grad}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- losses


def direct_loss(model: Any, loss: str, data: list[Any], **settings: float) -> torch.Tensor:
    """The sum of a loss, row by row, by the formulas of the client's documentation."""
    total = torch.zeros(())
    for one in data:
        given = {name: torch.from_numpy(value.to_numpy()) for name, value in one.loss_fn_inputs.items()}
        tokens = torch.tensor([one.model_input.to_ints()])
        logp = model(tokens).log_softmax(-1)[0].gather(1, given["target_tokens"][:, None])[:, 0]
        if loss == "cross_entropy":
            total = total - (logp * given["weights"]).sum()
            continue
        q, A = given["logprobs"], given["advantages"]
        low, high = settings.get("clip_low_threshold", 0.8), settings.get("clip_high_threshold", 1.2)
        ratio = torch.exp(logp - q)
        if loss == "gspo":  # from the second token on; s^T is the product of r, at a token s r / r without its gradient
            s = ratio[1:].detach().prod() ** (1 / len(ratio[1:])) * ratio / ratio.detach()
            gains = torch.minimum(s * A, s.clamp(low, high) * A)
        else:
            gains = {
                "importance_sampling": ratio * A,
                "ppo": torch.minimum(ratio * A, ratio.clamp(low, high) * A),
                "cispo": ratio.detach().clamp(low, high) * logp * A,
                "dro": logp * A - 0.5 * settings.get("beta", 0.05) * (logp - q) ** 2,
            }[loss] * given["weights"]
        total = total - gains.sum()
    return total


CLIP = {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}
SETTINGS = {"ppo": CLIP, "gspo": CLIP, "dro": {"beta": 0.3}}


@pytest.mark.parametrize("loss", TOKEN_LOSSES)
def test_each_loss_and_a_step_from_it_are_what_the_formula_and_torch_give(client, service, loss):
    data = batch_of(loss)
    settings = SETTINGS.get(loss, {})
    training = lora_client(client)
    result = training.forward_backward(data, loss, settings).result()
    step = training.optim_step(tinker.AdamParams(**ADAM)).result()

    model = base_model().adapted(Trained(4, seed=7))
    expected = direct_loss(model, loss, data, **settings)
    expected.backward()
    assert result.metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
    for one, output in zip(data, result.loss_fn_outputs, strict=True):
        assert output["logprobs"].to_numpy().shape == one.loss_fn_inputs["target_tokens"].to_numpy().shape
    elements = sum(output["elementwise_loss"].to_numpy().sum() for output in result.loss_fn_outputs)
    assert elements == pytest.approx(expected.item(), rel=1e-4, abs=1e-5)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = dict(ADAM)
    norm = torch.nn.utils.clip_grad_norm_(trained, adam.pop("grad_clip_norm"))
    betas = (adam.pop("beta1"), adam.pop("beta2"))
    torch.optim.AdamW(trained, lr=adam.pop("learning_rate"), betas=betas, **adam).step()
    assert step.metrics["grad_norm:mean"] == pytest.approx(norm.item(), rel=1e-4)
    torch.testing.assert_close(live_weights(service, training), trained_weights(model), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_several_targets_a_token(client, service, is_sparse):
    """Distillation from a teacher's likeliest tokens: cross_entropy with their probabilities as weights."""
    data = []
    expected = torch.zeros(())
    model = base_model().adapted(Trained(4, seed=7))
    for place, ids in enumerate(IDS):
        generator = torch.Generator().manual_seed(place)
        targets = torch.randint(1, 90, (len(ids), 3), generator=generator)
        weights = torch.rand(len(ids), 3, generator=generator)
        if is_sparse:  # the client sends a matrix with many zeros in another form
            targets[1:] = weights[1:] = 0
        inputs = {"target_tokens": targets, "weights": weights}
        data.append(tinker.Datum(tinker.ModelInput.from_ints(ids), inputs))
        assert (data[0].loss_fn_inputs["weights"].sparse_crow_indices is not None) == is_sparse
        logp = model(torch.tensor([ids])).log_softmax(-1)[0].gather(1, targets)
        expected = expected - (logp * weights).sum()
    expected.backward()
    training = lora_client(client)
    result = training.forward_backward(data, "cross_entropy").result()
    assert result.metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(result.loss_fn_outputs[-1]["logprobs"].to_numpy(), logp.detach(), atol=1e-5)
    assert_same_gradients(service, training, model)


def test_a_loss_of_the_clients_own(client, service):
    def loss(data: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return sum(one.square().mean() for one in logprobs), {"mine:mean": 3.0}  # type: ignore[return-value]

    training = lora_client(client)
    data = [datum(ids) for ids in IDS]
    result = training.forward_backward_custom(data, loss).result()
    model = base_model().adapted(Trained(4, seed=7))
    logprobs = []
    for ids in IDS:
        table = model(torch.tensor([ids[:-1]])).log_softmax(-1)[0]
        logprobs.append(table.gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    expected, _ = loss(data, logprobs)
    expected.backward()
    assert result.metrics["mine:mean"] == 3.0
    assert result.metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(service, training, model)


def test_a_batch_in_chunks_is_the_batch(address, service, monkeypatch):
    data = batch_of("cross_entropy")
    results = []
    for length in (1024, 1):
        monkeypatch.setitem(service_app.CLIENT_CONFIG, "fwdbwd_max_chunk_len", length)
        training = lora_client(client_of(address))
        results.append((training.forward_backward(data, "cross_entropy").result(), training))
    (whole, first), (cut, second) = results
    assert cut.metrics["loss:sum"] == pytest.approx(whole.metrics["loss:sum"], rel=1e-5)
    for left, right in zip(whole.loss_fn_outputs, cut.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(left["logprobs"].to_numpy(), right["logprobs"].to_numpy(), atol=1e-5)
    assert_same_gradients(service, second, live_model(service, first.model_id))


# ---------------------------------------------------------------------- clients side by side, and their states


def test_a_saved_state_goes_on_as_if_it_had_not_been_saved(client, service):
    straight = lora_client(client)
    train(straight, 2)
    path = straight.save_state("two").result().path
    train(straight, 2, first=2)
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    train(resumed, 2, first=2)
    assert_same(live_weights(service, resumed), live_weights(service, straight))
    # Without the optimizer's state the weights are the same, and the next steps are others.
    restarted = client.create_training_client_from_state(path).result()
    outputs = [one.forward([datum(IDS[0])], "cross_entropy").result() for one in (restarted, straight)]
    assert outputs[0].metrics != outputs[1].metrics
    straight.load_state_with_optimizer(path).result()
    train(straight, 2, first=2)
    assert_same(live_weights(service, straight), live_weights(service, resumed))
    train(restarted, 2, first=2)
    changed = live_weights(service, restarted)
    assert not all(torch.equal(one, changed[name]) for name, one in live_weights(service, resumed).items())
    with pytest.raises(tinker.RequestFailedError, match="two.*overwrite"):
        straight.save_state("two").result()
    straight.save_state("two", overwrite=True).result()
    rest = rest_of(client._base_url)
    (listed,) = rest.list_checkpoints(straight.model_id).result().checkpoints
    assert listed.tinker_path == path and listed.checkpoint_type == "training"


def test_a_model_that_is_trained_whole(client, service):
    training = client.holder  # the client has no method for it: it sends the request without lora_config
    answer = httpx.post(
        f"{client._base_url}/api/v1/create_model",
        json={"session_id": training.get_session_id(), "model_seq_id": 900, "base_model": NAME},
    )
    model_id = answer.json()["request_id"].removesuffix(":0")
    info = httpx.post(f"{client._base_url}/api/v1/get_info", json={"model_id": model_id}).json()
    assert info["is_lora"] is False
    whole = tinker.TrainingClient(training, 900, model_id, info=tinker.types.GetInfoResponse(**info))
    train(whole, 2)
    model = base_model().adapted(Trained(0))
    names = " ".join(live_weights(service, lora_client(client, train_mlp=False)))
    assert "qkv" in names and "head_adapter" in names and "mlp" not in names
    assert live_weights(service, whole).keys() == trained_weights(model).keys() == dict(model.named_parameters()).keys()
    sampler = whole.save_weights_and_get_sampling_client().result()
    tokens = sampler.sample(tinker.ModelInput.from_ints(IDS[0]), 1, tinker.SamplingParams(max_tokens=4, temperature=0))
    logits = live_model(service, whole.model_id)(torch.tensor([IDS[0]]))[0, -1]
    assert tokens.result().sequences[0].tokens[0] == int(logits.argmax())


def test_saved_adapters_are_read_by_the_other_commands(client, service):
    training = lora_client(client, train_unembed=False)
    train(training, 2)
    for path in (training.save_state("here").result().path, training.save_weights_for_sampler("here").result().path):
        step, _ = service.path_of(service.models[training.model_id].owner, path)
        found = read_adapters(step, base_model().model.config)
        assert_same(found.tensors, live_weights(service, training))


# ---------------------------------------------------------------------- sampling


@pytest.fixture(scope="module")
def trained(client: Any) -> Any:
    training = lora_client(client)
    train(training, 2)
    return training


def test_greedy_samples_are_the_engines_and_their_logprobs_the_trainers(trained, service):
    sampler = trained.save_weights_and_get_sampling_client().result()
    prompt = IDS[0]
    model = live_model(service, trained.model_id)
    engine = Engine(model, service.base.tokenizer, tiny.cpu_device())
    engine.stop_ids = set()
    engine.call_start = -1
    params = [(0.0, 0), (0.8, 5), (0.8, 6)]
    expected, _ = engine.generate(
        [prompt] * 3, max_tokens=12, sampling=[SamplingParams(temperature=t, seed=seed) for t, seed in params]
    )
    greedy = sampler.sample(
        tinker.ModelInput.from_ints(prompt), 1, tinker.SamplingParams(max_tokens=12, temperature=0, stop=[]),
        include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2,
    )  # fmt: skip
    drawn = sampler.sample(
        tinker.ModelInput.from_ints(prompt), 2, tinker.SamplingParams(max_tokens=12, temperature=0.8, seed=5, stop=[])
    ).result()
    greedy = greedy.result()
    (sequence,) = greedy.sequences
    assert [sequence.tokens, *(one.tokens for one in drawn.sequences)] == expected
    assert sequence.stop_reason == "length" and len({one.sequence_id for one in drawn.sequences}) == 2
    # Logprobs of prompt and reply are those of a forward pass in training.
    ids = prompt + sequence.tokens
    output = trained.forward([datum(ids)], "cross_entropy").result().loss_fn_outputs[0]
    assert greedy.prompt_logprobs[0] is None
    sampled = greedy.prompt_logprobs[1:] + sequence.logprobs
    np.testing.assert_allclose(sampled, output["logprobs"].to_numpy(), atol=1e-5)
    table = model(torch.tensor([ids])).log_softmax(-1)[0]
    best = table[len(prompt) - 1].topk(2)
    assert [token for token, _ in sequence.topk_logprobs[0]] == best.indices.tolist()
    best = table[0].topk(3)
    assert greedy.topk_prompt_logprobs[0] is None
    assert [token for token, _ in greedy.topk_prompt_logprobs[1]] == best.indices.tolist()
    last = sampler.compute_logprobs(tinker.ModelInput.from_ints(prompt), prompt_logprobs_last_n=2).result()
    assert last[:-2] == [None] * (len(prompt) - 2)
    np.testing.assert_allclose(last[-2:], greedy.prompt_logprobs[-2:], atol=1e-6)
    more = sampler.compute_logprobs(
        tinker.ModelInput.from_ints(prompt), prompt_logprobs_last_n=len(prompt) - 1
    ).result()
    np.testing.assert_allclose(more[1:], greedy.prompt_logprobs[1:], atol=1e-6)


def test_a_sample_ends_where_its_request_says(trained, service):
    sampler = trained.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints(IDS[0])
    settings = {"max_tokens": 30, "temperature": 1.0, "seed": 3}

    def sample(**more: Any) -> Any:
        return sampler.sample(prompt, 1, tinker.SamplingParams(**settings, **more)).result().sequences[0]

    whole = sample(stop=[])
    assert len(whole.tokens) == 30 and whole.stop_reason == "length"
    stopped = sample(stop=[whole.tokens[7]])
    end = whole.tokens.index(whole.tokens[7]) + 1
    assert stopped.tokens == whole.tokens[:end] and stopped.stop_reason == "stop"
    text = service.base.tokenizer.decode(whole.tokens[9:11])
    stopped = sample(stop=text)
    assert text in service.base.tokenizer.decode(stopped.tokens) and stopped.stop_reason == "stop"
    assert text not in service.base.tokenizer.decode(stopped.tokens[:-1])


def test_the_base_and_saved_weights_are_scored_up_to_the_whole_context(client, trained, service):
    ids = (IDS[0] * CONTEXT)[: CONTEXT + 1]
    prompt = tinker.ModelInput.from_ints(ids[:CONTEXT])
    of_base = client.create_sampling_client(base_model=NAME).result().compute_logprobs(prompt).result()
    table = service.base.model(torch.tensor([ids[:CONTEXT]])).log_softmax(-1)[0]
    expected = table[:-1].gather(1, torch.tensor(ids[1:CONTEXT])[:, None])[:, 0]
    np.testing.assert_allclose(of_base[1:], expected.detach(), atol=1e-5)
    path = trained.save_weights_for_sampler("mine").result().path
    sampler = client.create_sampling_client(model_path=path).result()
    saved = sampler.compute_logprobs(prompt).result()
    output = trained.forward([datum(ids)], "cross_entropy").result().loss_fn_outputs[0]
    np.testing.assert_allclose(saved[1:], output["logprobs"].to_numpy()[:-1], atol=1e-5)
    assert abs(saved[1] - of_base[1]) > 1e-4
    with pytest.raises(tinker.BadRequestError, match="prompt: .*64"):
        sampler.compute_logprobs(tinker.ModelInput.from_ints(ids)).result()
    params = tinker.SamplingParams(max_tokens=0)
    prompt = tinker.ModelInput.from_ints(IDS[0])
    (empty,) = sampler.sample(prompt, 1, params, topk_sample_logprobs=2).result().sequences
    assert not empty.tokens and not empty.logprobs and empty.stop_reason == "length"


def test_a_sample_that_fails_costs_none_of_those_decoded_with_it(trained, service, monkeypatch):
    sampler = trained.save_weights_and_get_sampling_client().result()
    together: list[int] = []
    started = threading.Event()
    sample = service_module.sample

    def failing(engine: Any, jobs: Any, slots: int) -> Iterator[list[bytes]]:
        together.append(len(jobs))
        if any(job.max_tokens == 13 for job in jobs):
            raise RuntimeError("a fault of this one alone")
        results = list(sample(engine, jobs, slots))
        started.wait(10)  # until the others are in the queue
        yield results[-1]

    monkeypatch.setattr(service_module, "sample", failing)
    prompt = tinker.ModelInput.from_ints(IDS[0])
    first = sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=1))
    while not together:
        time.sleep(0.01)
    rest = [sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=limit, stop=[])) for limit in (3, 13, 4)]
    while len(service.queue) < len(rest):
        time.sleep(0.01)
    started.set()
    first.result()
    assert [len(rest[place].result().sequences[0].tokens) for place in (0, 2)] == [3, 4]
    with pytest.raises(tinker.RequestFailedError, match="failed on this request"):
        rest[1].result()
    assert together == [1, 3, 1, 1, 1]


# ---------------------------------------------------------------------- mistakes, keys and limits


def valid_requests(client: Any, training: Any, first: int) -> dict[str, Any]:
    """A good body of each route, before it is spoiled."""
    session = client.holder.get_session_id()
    model = {"model_id": training.model_id}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": IDS[0]}]}
    adam = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0}
    sampler = client.create_sampling_client(base_model=NAME).result()._sampling_session_id
    return {
        "client/config": {"sdk_version": "0.38.0"},
        "create_session": {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"},
        "session_heartbeat": {"session_id": session},
        "create_model": {
            "session_id": session, "model_seq_id": 0, "base_model": NAME, "optimizer_config": {"type": "adamw"},
            "lora_config": {"rank": 4, "train_mlp": True, "train_attn": True, "train_unembed": True},
        },
        "get_info": model,
        "optim_step": {**model, "seq_id": first, "adam_params": adam},
        "save_weights": {**model, "seq_id": first + 1, "path": "name", "overwrite": False},
        "save_weights_for_sampler": {**model, "seq_id": first + 2, "path": "name", "kind": "snapshot"},
        "load_weights": {**model, "seq_id": first + 3, "path": "tinker://a/weights/b", "optimizer": True},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 7, "base_model": NAME},
        "asample": {
            "prompt": prompt, "sampling_params": {"max_tokens": 1, "temperature": 1.0, "stop": ["x"]},
            "num_samples": 1, "sampling_session_id": sampler, "seq_id": 99, "topk_prompt_logprobs": 0,
        },
        "retrieve_future": {"request_id": f"{training.model_id}:0", "allow_metadata_only": True},
        "weights_info": {"tinker_path": "tinker://a/weights/b"},
    }  # fmt: skip


WRONG = (None, True, -1, 10**30, 0.5, "", "../../etc/passwd", "x" * 5000, [], [[]], {}, {"a": {"b": []}}, ["x", 1])


def wire_form(training: Any, data: list[Any], loss: Any, number: int, **config: float) -> bytes:
    """The body of the client's forward_backward."""
    from tinker.proto.request_conv import forward_backward_request_to_proto
    from tinker.types.forward_backward_request import ForwardBackwardRequest

    given = tinker.types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config or None)
    request = ForwardBackwardRequest(given, training.model_id, number)
    return forward_backward_request_to_proto(request).SerializeToString()


def targets(*values: Any) -> Any:
    """A datum whose targets are another tensor: values, dtype, shape, and the parts of a sparse matrix."""
    one = datum([5, 6])
    one.loss_fn_inputs["target_tokens"] = tinker.TensorData(*values)
    return one


def wrong_batches() -> Iterator[tuple[str, list[Any], str, dict[str, float]]]:
    """The word that the answer names, and the data, loss and settings of a batch."""
    yield "loss_fn_inputs", [datum([5, 6, 7], weights=[1, 1])], "ppo", {}
    yield "stable_reinforce", batch_of("ppo"), "stable_reinforce", {}
    yield "sequence_ratio_mask", batch_of("ppo"), "gspo", {}
    matrix = targets([5], "int64", [1, 2], [0, 1], [2])
    yield "sparse matrix", [matrix, matrix], "cross_entropy", {}
    yield "not whole numbers", [targets([5.5], "float32", [1])], "cross_entropy", {}
    pair = targets([5, 6], "int64", [1, 2])
    yield "[1, 2]", [pair, datum([5, 6])], "cross_entropy", {}
    yield "loss_fn_inputs", [pair], "importance_sampling", {}
    yield "clip", batch_of("ppo"), "ppo", {"clip": 1.0}
    yield "beta", batch_of("dro"), "dro", {"beta": -1.0}
    yield "target_tokens", [datum([5, 10**6])], "cross_entropy", {}
    yield "model_input", [datum([-5, 6])], "cross_entropy", {}
    yield "64", [datum([5] * 100)], "cross_entropy", {}
    yield "weights", [datum([5, 6, 7], weights=[1])], "cross_entropy", {}
    yield "weights", [datum([5, 6, 7], weights=[1, np.nan])], "cross_entropy", {}
    yield "data", [], "cross_entropy", {}


def test_malformed_requests_are_refused_in_one_line(client, address):
    training = lora_client(client)
    spoiled: list[tuple[str, bytes, dict[str, str]]] = []
    for route, body in valid_requests(client, training, first=50).items():
        for content in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 300):
            spoiled.append((route, content, {}))
        for place, name in enumerate(body):
            changed = [{**body, name: wrong, "surplus": 1} for wrong in WRONG[place % 3 :: 3]]
            changed.append({key: one for key, one in body.items() if key != name})
            spoiled += [(route, json.dumps(one).encode(), {}) for one in changed]
    good = wire_form(training, batch_of("ppo"), "ppo", 60)
    generator = np.random.default_rng(0)
    for _ in range(60):
        content = bytearray(good[: generator.integers(1, len(good))])
        for place in generator.integers(0, len(content), 3):
            content[place] ^= generator.integers(1, 256)
        spoiled.append(("forward_backward", bytes(content), PROTO))
    with httpx.Client(base_url=f"{address}/api/v1/", timeout=30) as http:
        answers = [http.post(route, content=content, headers=headers) for route, content, headers in spoiled]
        refused = [answer for answer in answers if answer.status_code >= 400]  # a field may have a default
        assert len(refused) > 220 and all(mistake_of(answer) for answer in refused)
        assert http.get("nonsense").status_code == 404 and http.get("asample").status_code == 405
        assert http.post("forward_backward", content=good).status_code == 415
        for word, data, loss, settings in wrong_batches():
            content = wire_form(training, data, loss, 61, **settings)
            assert word in mistake_of(http.post("forward_backward", content=content, headers=PROTO))
    # The service is as it was.
    other = lora_client(client)
    train(other, 1)
    assert other.forward([datum(IDS[0])], "cross_entropy").result().metrics["loss:sum"] > 0


def test_a_refused_request_names_its_field_and_holds_up_no_other(client):
    training = lora_client(client)
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints(IDS[0])
    # The RL recipes of tinker-cookbook 0.6.1 request this by default.
    recording = client.create_sampling_client(base_model=NAME, record_stability_info=True).result()
    dimuon = tinker.DimuonOptimizerConfig()
    refused, failed = tinker.BadRequestError, tinker.RequestFailedError
    for error, words, request in (
        (refused, "nonsense", lambda: training.forward_backward([datum(IDS[0])], "nonsense")),
        (refused, "importance_sampling", lambda: training.forward_backward([datum(IDS[0])], "stable_reinforce")),
        (failed, "no gradients", lambda: training.optim_step(tinker.AdamParams())),
        (failed, "model .* does not", lambda: training._load_state_impl("tinker://elsewhere/weights/x", False, None)),
        (refused, "adamw", lambda: client.create_lora_training_client(base_model=NAME, optimizer=dimuon)),
        (refused, NAME, lambda: client.create_lora_training_client(base_model="Qwen/Qwen3-8B")),
        (
            refused, "choose loss_fn=importance_sampling",
            lambda: recording.sample(prompt, 1, tinker.SamplingParams(max_tokens=2)),
        ),
        (refused, "lora_config.rank: ", lambda: client.create_lora_training_client(base_model=NAME, rank=0)),
        (refused, "path: .*100", lambda: training.save_state("höhe 1")),
        (
            refused, "sampling_params.top_p: ",
            lambda: sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=1, top_p=2.0)),
        ),
        (refused, "adam_params.beta2: ", lambda: training.optim_step(tinker.AdamParams(beta2=1.0))),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            request().result()
    train(training, 1)


@pytest.mark.parametrize("wrong", [{"learning_rate": 1e30}, {"learning_rate": 1e-3, "eps": 0.0}], ids=["rate", "eps"])
def test_a_step_to_weights_that_are_not_finite_is_refused_and_so_is_all_that_follows(client, service, wrong):
    training = lora_client(client)
    path = training.save_state("good").result().path
    training.forward_backward([datum(IDS[0])], "cross_entropy").result()
    for request in (
        lambda: training.optim_step(tinker.AdamParams(**wrong)),
        lambda: training.forward([datum(IDS[0])], "cross_entropy"),
        lambda: training.save_state("bad"),
        lambda: training.save_weights_and_get_sampling_client(),
    ):
        with pytest.raises(tinker.RequestFailedError, match="learning_rate or eps"):
            request().result()
    training._load_state_impl(path, False, None).result()
    train(training, 1)
    # Logits that are not finite: the sample says so.
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints(IDS[0])
    sampler.compute_logprobs(prompt).result()
    session = sampler._sampling_session_id
    engine = service.engine(service.sampled_weights(service.models[training.model_id].owner, session))
    with torch.no_grad():
        engine.model.head_adapter.lora_B.fill_(torch.nan)
    for request in (sampler.compute_logprobs(prompt), sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=2))):
        with pytest.raises(tinker.RequestFailedError, match="not finite"):
            request.result()


# ---------------------------------------------------------------------- the page about it


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1], ids=["sft", "grpo"])
def test_the_loops_of_the_page_learn(place, address, monkeypatch, capsys):
    page = (Path(__file__).resolve().parents[2] / "docs" / "train_server.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[place]
    assert len(code.splitlines()) <= (40, 60)[place]
    monkeypatch.setenv("TINKER_BASE_URL", address)
    monkeypatch.setenv("TINKER_API_KEY", "tml-any")
    # A model of random weights needs larger steps than one that has learned a language, and here fewer of them.
    code = code.replace("STEPS = 12", "STEPS = 7").replace("learning_rate=1e-3", "learning_rate=2e-2")
    exec(compile(code, "the page", "exec"), {})
    found = [float(value) for value in re.findall(r"(?:loss|reward) (\S+)", capsys.readouterr().out)]
    if place == 0:
        assert found[-1] < found[0] / 4, found
    else:
        assert np.mean(found[-2:]) > np.mean(found[:2]) + 0.1, found
