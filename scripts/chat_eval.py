"""Evaluate a chat model on tasks: accuracy with its interval, ChatCORE, and some of the replies.

python -m scripts.chat_eval --source sft --tasks stories,addition
torchrun --standalone --nproc_per_node=8 -m scripts.chat_eval -- --tasks gsm8k,mmlu,arc_easy --max_examples 1000
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from nanochat.shell.cli import Count, Positive, Seed, UserError, run
from nanochat.shell.log import print0, record, warn
from nanochat.shell.paths import STAGES, run_dir

SETTINGS = ("max_examples", "samples", "max_tokens", "temperature", "top_k", "top_p", "seed")  # that figures depend on


@dataclass(frozen=True)
class Config:
    source: str = "sft"  # a stage, or a checkpoint's folder
    model_tag: str | None = None  # default: the tag written last
    step: int | None = None  # default: the newest
    tasks: str = ""  # NAME[=PATH],NAME,...; default: all those made here that have a right answer
    hub: Literal["hf", "modelscope"] = "hf"  # where the other tasks come from
    max_examples: Positive = 200  # of each task; more than there are: all
    samples: Positive = 1  # replies to each question; the accuracy is their mean
    device_batch_size: Positive = 32  # rows a device computes at once
    max_tokens: Positive = 256  # of a reply
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    show: Count = 2  # replies of each task to print and to keep
    device: str = "auto"  # auto, npu, cuda or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of matrix products
    graphs: bool = False  # an accelerator records what a decoded token launches and replays it in one
    seed: Seed = 0  # of the sampled replies; the questions are the same for any


def main(config: Config) -> None:
    began = time.time()
    # The heavy imports stand here so that --help answers at once.
    from nanochat import device as devices
    from nanochat.checkpoint_manager import load_model, tag_of
    from nanochat.conversation import parts_of
    from nanochat.engine import Engine, check_sampling
    from nanochat.evals.chat import Graded, chat_core, evaluate, graded_choices, readable
    from nanochat.tasks.registry import open_task

    # ------------------------------------------------------------------ load
    check_sampling(config.temperature, config.top_k, config.top_p)
    if config.samples > 1 and config.temperature == 0:
        raise UserError(f"--samples {config.samples}: greedy replies are all the same; set --temperature, such as 0.7")
    tasks = {choice.name: open_task(choice, "test", config.hub) for choice in graded_choices(config.tasks)}
    device = devices.init(config.device, config.dtype)
    model, tokenizer, meta = load_model(config.source, device, model_tag=config.model_tag, step=config.step)
    engine = Engine(model, tokenizer, device, config.graphs)
    print0(f"model: {meta['folder']}, step {meta['step']}")

    # ------------------------------------------------------------------ a line a task
    width = max(map(len, (*tasks, "task")))
    print0(f"\n{'task':{width}}  accuracy    95% interval  guessing  questions  too long  seconds")
    figures: dict[str, dict[str, Any]] = {}
    kept: list[tuple[str, Graded]] = []
    for name, task in tasks.items():
        result, replies = evaluate(
            task, model, engine, batch_rows=config.device_batch_size, max_examples=config.max_examples,
            samples=config.samples, max_tokens=config.max_tokens, temperature=config.temperature,
            top_k=config.top_k, top_p=config.top_p, seed=config.seed, keep=config.show,
        )  # fmt: skip
        interval = f"{result.low:.1%} - {result.high:.1%}"
        print0(
            f"{name:{width}}  {result.accuracy:8.1%}  {interval:>14}  {result.baseline:8.1%}  {result.questions:9,}"
            f"  {result.too_long:8,}  {result.seconds:7.1f}"
        )
        figures[name] = {**asdict(result), "settings": {flag: getattr(config, flag) for flag in SETTINGS}}
        kept += [(name, reply) for reply in replies]

    # ------------------------------------------------------------------ replies, as a reader sees them
    for name, reply in kept:
        print0(f"\n{name}, {'right' if reply.correct else 'wrong'}")
        for message in (*reply.messages, {"role": "assistant", "content": reply.reply}):
            text = readable(parts_of(message["content"])).replace("\n", "\n    ")
            print0(f"  {message['role']}: {text}")

    # ------------------------------------------------------------------ together with this step's earlier tasks
    if device.is_main:
        samples = [{"task": name, **asdict(reply)} for name, reply in kept]
        results: dict[str, Any] = {"step": meta["step"], "tasks": figures, "samples": samples}
        path = None
        if config.source in STAGES:
            path = run_dir(config.source, tag_of(Path(meta["folder"]))) / "chat_eval.json"
            if (together := merged(path, results)) is None:
                print0(f"\nnot written: {path} has such figures with other settings; move it away to begin anew")
                path = None
            results = together or results
        results["chatcore"] = chat_core((task["accuracy"], task["baseline"]) for task in results["tasks"].values())
        earlier = len(results["tasks"]) - len(figures)
        before = f", {earlier} of them evaluated before" if earlier else ""
        print0(f"\nChatCORE: {results['chatcore']:.4f}, the mean over {len(results['tasks'])} tasks{before}")
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(results, indent=1, ensure_ascii=False)
            path.write_text(text, encoding="utf-8", errors="replace")
    if config.source in STAGES:
        record(config.source, tag_of(Path(meta["folder"])), began, device)
    devices.shutdown(device)


def merged(path: Path, results: dict[str, Any]) -> dict[str, Any] | None:
    """The results, and those of other tasks that are already there for the same step; None where one of these tasks
    is there with other settings, which is kept."""
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if earlier["step"] != results["step"]:
            return results
        if any(results["tasks"].get(n, task)["settings"] != task["settings"] for n, task in earlier["tasks"].items()):
            return None
        tasks = {name: {**task, "accuracy": float(task["accuracy"]), "baseline": float(task["baseline"])}
                 for name, task in earlier["tasks"].items()}  # fmt: skip
        samples = [sample for sample in earlier["samples"] if sample["task"] not in results["tasks"]]
    except FileNotFoundError:
        return results
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        warn(f"{path} is damaged ({error!r}) and is written anew")
        return results
    return {**results, "tasks": {**tasks, **results["tasks"]}, "samples": [*samples, *results["samples"]]}


if __name__ == "__main__":
    run(main, Config)
