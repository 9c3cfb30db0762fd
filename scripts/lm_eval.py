"""Evaluate a model on the tasks of EleutherAI's lm-evaluation-harness, of every kind.

python -m scripts.lm_eval --source sft --tasks arc_easy,hellaswag --limit 200

python -m scripts.lm_eval --source hf:Qwen/Qwen3-0.6B --tasks gsm8k --apply_chat_template --out gsm8k.json

python -m scripts.lm_eval --tasks my_task --include_path my_tasks

python -m nanochat.run.launch --nproc_per_node=8 -m scripts.lm_eval -- --source base --tasks mmlu --num_fewshot 5

The results equal the results of the harness's `hf` model on the folder that scripts.export writes (docs/evaluate.md).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from nanochat.cli import Count, Positive, Range, Seed, UserError, run
from nanochat.log import print0
from nanochat.screen import phase


@dataclass(frozen=True)
class Config:
    tasks: str  # NAME,NAME,...: tasks and groups of the harness or of --include_path; * matches any text
    source: str = "auto"  # a stage, a folder (ours, Hugging Face's or peft's) or hf:ORG/NAME; auto: the furthest stage
    model_tag: str | None = None  # default: the tag written last
    step: int | None = None  # default: the newest
    include_path: str | None = None  # a folder with your tasks, each a .yaml in the harness's form
    num_fewshot: Count | None = None  # solved examples before each question; default: the task's number
    limit: Annotated[float, Range(1e-9)] | None = None  # examples per task; below 1: a share of them; default: all
    apply_chat_template: bool = False  # ask as in a chat; without it the model continues a text
    fewshot_as_multiturn: bool = True  # in a chat, each solved example is a separate turn
    system: str = ""  # system message of the chat, or the text before each prompt
    gen_kwargs: str = ""  # replaces the tasks' generation settings, such as max_gen_toks=128,temperature=0.7
    device_batch_size: Positive = 32  # texts that a device computes at once
    out: str | None = None  # write the results to this .json
    log_samples: bool = False  # add every prompt and answer to --out
    seed: Seed = 0  # seed of the replies that a task samples
    device: str = "auto"  # auto, npu, cuda or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # the dtype of matrix products
    # An accelerator records the launches of a decoded token and replays them as one; auto: on accelerators.
    graphs: Literal["auto", "on", "off"] = "auto"


def main(config: Config) -> None:
    phase("loading the tasks")
    # The heavy imports are here so that --help answers at once.
    try:
        from lm_eval import evaluator
        from lm_eval.utils import handle_non_serializable, make_table
    except ImportError as error:
        raise UserError(f'{error}: install the harness with `pip install -e ".[eval]"`') from error
    from nanochat import device as devices
    from nanochat import provenance
    from nanochat.checkpoint_manager import load_model
    from nanochat.evals.harness import NanochatLM, Tasks

    # ------------------------------------------------------------------ which tasks
    if config.include_path is not None and not Path(config.include_path).is_dir():
        raise UserError(f"--include_path {config.include_path}: there is no such folder")
    tasks = Tasks(include_path=config.include_path)
    chosen: list[str] = []
    for pattern in filter(None, (name.strip() for name in config.tasks.split(","))):
        found = tasks.match_tasks([pattern])
        if not found:
            raise UserError(f"--tasks {pattern}: the harness has no such task; name a folder with it by --include_path")
        chosen += [name for name in found if name not in chosen]
    if not chosen:
        raise UserError("--tasks names no task, such as --tasks arc_easy,hellaswag")

    # ------------------------------------------------------------------ the model
    device = devices.init(config.device, config.dtype)
    model, tokenizer, meta = load_model(config.source, device, model_tag=config.model_tag, step=config.step)
    if config.apply_chat_template and (meta["stage"] == "base" or not tokenizer.can_chat):
        raise UserError(f"--apply_chat_template: {meta['folder']} is a base model, which continues text; leave it out")
    print0(f"model: {meta['folder']}, step {meta['step']}")
    lm = NanochatLM(model, tokenizer, device, config.device_batch_size, config.graphs, config.seed)

    # ------------------------------------------------------------------ prompts, answers, metrics
    options: dict[str, Any] = {
        "tasks": chosen, "task_manager": tasks, "num_fewshot": config.num_fewshot,
        "limit": config.limit if config.limit is None or config.limit < 1 else int(config.limit),
        "system_instruction": config.system or None, "apply_chat_template": config.apply_chat_template,
        "fewshot_as_multiturn": config.apply_chat_template and config.fewshot_as_multiturn,
        "gen_kwargs": config.gen_kwargs or None, "log_samples": config.log_samples,
        "batch_size": config.device_batch_size,
    }  # fmt: skip
    # The harness asks git about the folder in which it is started. If that is not a repository, git complains on the
    # terminal. Report the commit of this code instead: it computes the results.
    evaluator.get_git_commit_hash = provenance.commit
    results = evaluator.simple_evaluate(lm, **options)
    if results is not None and device.is_main:  # each host's first rank has them
        print0(make_table(results))
        if results.get("groups"):
            print0(make_table(results, "groups"))
        if config.out is not None:
            report = {**results, "source": config.source, "model": meta["folder"], "step": meta["step"]}
            text = json.dumps(report, indent=1, ensure_ascii=False, default=handle_non_serializable)
            Path(config.out).expanduser().write_text(text, encoding="utf-8", errors="replace")
            print0(f"written to {config.out}")
    devices.shutdown(device)


if __name__ == "__main__":
    run(main, Config, shows_progress=True)
