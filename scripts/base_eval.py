"""Evaluate a base model: bits per byte on train and validation text, the CORE metric, samples, and the share of demo
stories that are coherent.

python -m scripts.base_eval --data demo --stories 200

python -m nanochat.run.launch --nproc_per_node=8 -m scripts.base_eval -- --data climbmix --core eval_bundle

The bundle for --core is a file to fetch and unpack: curl -LO URL, with the URL in nanochat/evals/core.py, and unzip.
"""

import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from nanochat.ground.cli import Count, Positive, UserError, run
from nanochat.ground.log import print0, print_table, record
from nanochat.ground.paths import STAGES, run_dir
from nanochat.ground.screen import phase
from nanochat.sampling import SamplingParams, seed_of
from nanochat.serve.decoding_flags import SamplingFlags

if TYPE_CHECKING:
    from nanochat.engine import Engine

STORIES_AT_ONCE = 50


@dataclass(frozen=True)
class Config:
    source: str = "base"  # a stage, a folder (ours, Hugging Face's or peft's) or hf:ORG/NAME
    model_tag: str | None = None  # default: the tag written last
    data: str = "demo"  # a file, a folder, or a name: demo, pydoc, a hub dataset; or several with weights
    val_data: str | None = None  # held-out text; default: the end of --data
    columns: str = ""  # text=COLUMN, where the text in files has another name
    hub: Literal["hf", "modelscope"] = "hf"  # where hub datasets come from
    shards: Positive | None = None  # files of a hub dataset, as in training
    eval_tokens: Positive = 1_048_576  # tokens of text to evaluate in each split
    device_batch_size: Positive = 16  # rows a device computes at once
    core: str = ""  # the CORE metric: a folder with its bundle of tasks; default: not measured
    samples: Count = 4  # samples to print
    prompt: str = ""  # the start of every sample; default: openings of held-out demo stories, or nothing
    stories: Count = 0  # demo stories to sample and grade with the story checker
    max_tokens: Positive = 256  # tokens of a sample
    sampling: Annotated[SamplingFlags, tyro.conf.arg(name="")] = SamplingFlags()
    device: str = "auto"  # auto, npu, cuda or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # the dtype of matrix products


def main(config: Config) -> None:
    began = time.time()
    phase("loading torch")
    # The heavy imports are here so that --help answers at once.
    import torch

    from nanochat import device as devices
    from nanochat.bpb import bits_per_byte, validation_rows
    from nanochat.checkpoint_manager import load_model
    from nanochat.demo.checker import check_story
    from nanochat.demo.stories import openings as story_openings
    from nanochat.engine import Engine
    from nanochat.evals import core
    from nanochat.ground.corpus import by_part, mean_by_weight, open_corpus, weighted_parts
    from nanochat.model_folder import tag_of

    # ------------------------------------------------------------------ load
    corpora = open_corpus(config.data, config.val_data, hub=config.hub, shards=config.shards, columns=config.columns)
    tasks = core.open_bundle(config.core) if config.core else []
    device = devices.init(config.device, config.dtype)
    model, tokenizer, meta = load_model(config.source, device, model_tag=config.model_tag)
    tag = tag_of(Path(meta["folder"]))
    print0(f"model: {meta['folder']}, step {meta['step']}")
    results: dict[str, Any] = {"step": meta["step"]}
    sampling = config.sampling.over(meta["sampling"])

    # Check that the prompts fit the context before the slow part.
    begin = tokenizer.get_bos_token_id()
    context = model.config.sequence_len
    if config.samples and len(tokenizer.encode(config.prompt, prepend=begin)) >= context:
        raise UserError(f"--prompt has {context} tokens or more, all of the model's context: shorten the prompt")
    prompts = [config.prompt] * config.samples
    stories = config.stories
    samples_are_stories = config.data == "demo" and not config.prompt
    openings = story_openings(max(config.samples if samples_are_stories else 0, stories), config.sampling.seed)
    longest = max((len(ids) for ids in tokenizer.encode_batch(openings, prepend=begin)), default=0)
    if longest >= context:
        print0(f"a story's opening has {longest} tokens, the context {context}: stories and openings are skipped")
        stories = 0
    elif samples_are_stories:
        prompts = openings[: config.samples]

    # ------------------------------------------------------------------ bits per byte
    token_bytes = torch.tensor(tokenizer.token_bytes())
    document_mask = meta.get("pretraining", {}).get("document_mask", False)  # as in training
    scores: list[list[str]] = []  # rows of the table: measure, score, amount of text
    for split, corpus in zip(("train", "val"), corpora, strict=True):
        phase(f"reading the {split} text")
        bits = []
        for part in weighted_parts(corpus):  # one corpus of a mixture at a time
            rows = validation_rows(part.corpus, tokenizer, context, math.ceil(part.weight * config.eval_tokens))
            bits.append(
                bits_per_byte(model, rows, token_bytes, config.device_batch_size, device, document_mask=document_mask)
            )
            on = f"{rows[:, 1:].numel():,} tokens of {part.corpus.name}"
            scores.append([f"bits per byte, {split}", f"{bits[-1]:.4f}", on])
        results |= by_part(f"{split}_bpb", bits, corpus)
        results[f"{split}_bpb"] = mean_by_weight(bits, corpus)

    # ------------------------------------------------------------------ CORE
    if tasks:
        results["core"], results["core_tasks"] = core.evaluate(
            model, tokenizer, tasks, device, config.device_batch_size
        )
        scores.append(["CORE", f"{results['core']:.4f}", f"the mean of {len(tasks)} tasks"])

    # ------------------------------------------------------------------ samples and stories, on rank 0
    if device.is_main:
        engine = Engine(model, tokenizer, device)
        if prompts:
            results["samples"] = continue_text(engine, prompts, config.max_tokens, sampling)
            for text in results["samples"]:
                print0(f"\n{text}")
        if stories:
            problems = []
            for first in range(0, stories, STORIES_AT_ONCE):
                some = openings[first : min(first + STORIES_AT_ONCE, stories)]
                for text in continue_text(engine, some, config.max_tokens, sampling):
                    problems += check_story(text).problems[:1]
            results["stories"] = stories
            results["stories_passed"] = stories - len(problems)
            first_problem = f"; the first problem: {problems[0]}" if problems else ""
            passed = results["stories_passed"]
            scores.append(
                ["stories that hold together", f"{passed / stories:.1%}", f"{passed} of {stories}{first_problem}"]
            )
    print_table(("measure", "score", "on"), scores)
    stage = config.source.partition("/")[0]  # of base/TAG/step_100, too
    if stage in STAGES:
        if device.is_main:
            path = run_dir(stage, tag) / "eval.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(results, indent=1, ensure_ascii=False), encoding="utf-8")
        record(stage, tag, began, device)
    devices.shutdown(device)


def continue_text(engine: "Engine", prompts: list[str], max_tokens: int, sampling: SamplingParams) -> list[str]:
    """Each prompt with its continuation, up to the end of the document."""
    tokenizer = engine.tokenizer
    ids = tokenizer.encode_batch(prompts, prepend=tokenizer.get_bos_token_id())
    settings = [replace(sampling, seed=seed_of(sampling.seed, number)) for number in range(len(ids))]
    sequences, _ = engine.generate(ids, max_tokens=max_tokens, sampling=settings)
    texts = [prompt.encode() + tokenizer.decode_bytes(ids) for prompt, ids in zip(prompts, sequences, strict=True)]
    return [text.decode(errors="replace") for text in texts]


if __name__ == "__main__":
    run(main, Config, shows_progress=True)
