"""Evaluate a chat model on tasks: accuracy with its confidence interval, ChatCORE, and some of the replies.

Replies are sampled with the checkpoint's settings, as users get them; --temperature 0 is greedy.

python -m scripts.chat_eval --source sft --tasks stories,addition

python -m nanochat.run.launch --nproc_per_node=8 -m scripts.chat_eval -- --tasks gsm8k,mmlu,arc_easy --max_examples 1000
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from nanochat.ground.cli import Count, Positive, UserError, run
from nanochat.ground.log import counted, print0, print_table, record, warn
from nanochat.ground.paths import STAGES, run_dir
from nanochat.ground.screen import Bar, phase
from nanochat.sampling import SamplingParams
from nanochat.serve.decoding_flags import DecodingFlags, SamplingFlags


@dataclass(frozen=True)
class Config:
    source: str = "sft"  # a stage, a folder (ours, Hugging Face's or peft's) or hf:ORG/NAME
    model_tag: str | None = None  # default: the tag written last
    tasks: str = ""  # NAME[=PATH],NAME,...; default: all built-in tasks that have a right answer
    hub: Literal["hf", "modelscope"] = "hf"  # where to download the other tasks
    max_examples: Positive = 200  # questions per task, at most
    samples: Positive = 1  # replies to each question; the accuracy is their mean
    device_batch_size: Positive = 32  # rows a device computes at once
    max_tokens: Positive = 512  # tokens of a reply, within the context
    sampling: Annotated[SamplingFlags, tyro.conf.arg(name="")] = SamplingFlags()
    show: Count = 2  # replies of each task to keep for the report; the first one is printed
    table_only: bool = False  # print no replies; the report has them all the same
    device: str = "auto"  # auto, npu, cuda or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # the dtype of matrix products
    decoding: Annotated[DecodingFlags, tyro.conf.arg(name="")] = DecodingFlags()


def main(config: Config) -> None:
    began = time.time()
    phase("loading torch")
    # The heavy imports are here so that --help answers at once.
    from nanochat import device as devices
    from nanochat.checkpoint_manager import load_model
    from nanochat.engine import Engine
    from nanochat.evals.chat_tasks import Graded, Settings, chat_core, evaluate, graded_choices, short_chat
    from nanochat.model_folder import tag_of
    from nanochat.report.summary import PLACES, by_place
    from nanochat.tasks.flag import Reading, open_task

    # ------------------------------------------------------------------ load
    choices = graded_choices(config.tasks)
    tasks = {choice.name: open_task(choice, "test", Reading(hub=config.hub)) for choice in choices}
    files = {choice.name: Path(choice.path).name if choice.path else "" for choice in choices}
    device = devices.init(config.device, config.dtype)
    model, tokenizer, meta = load_model(config.source, device, model_tag=config.model_tag)
    sampling = config.sampling.over(meta["sampling"])
    if config.samples > 1 and sampling.is_greedy:
        raise UserError(f"--samples {config.samples}: greedy replies are all the same; set --temperature, such as 0.7")
    engine = Engine(model, tokenizer, device, **asdict(config.decoding))
    tag = tag_of(Path(meta["folder"]))
    print0(f"model: {meta['folder']}, step {meta['step']}")

    # ------------------------------------------------------------------ each task, then a table of them all
    settings = Settings(sampling, config.device_batch_size, config.max_examples, config.samples, config.max_tokens)
    results: dict[str, dict[str, Any]] = {}
    shown: list[tuple[str, Graded]] = []
    rows: list[list[str]] = []
    columns = ("task", "accuracy", "95% interval", PLACES, "guessing", "questions", "too long", "cut off", "seconds")
    with Bar("tasks", len(tasks)) as finished:
        for name, task in tasks.items():
            finished.note = name
            result, replies = evaluate(task, model, engine, settings, config.show)
            finished.done += 1
            interval = f"{result.low:.1%} - {result.high:.1%}"
            counts = [f"{count:,}" for count in (result.questions, result.too_long, result.cut_off)]
            accuracy = (f"{result.accuracy:.1%}", interval, by_place(result.places), f"{result.baseline:.1%}")
            rows.append([name, *accuracy, *counts, f"{result.seconds:.1f}"])
            found = asdict(result)
            measures = found.pop("measures")
            for measure, share in measures.items():
                if not measure.endswith(("_low", "_high")):
                    ends = [f"{measures[end]:.1%}" for end in (f"{measure}_low", f"{measure}_high") if end in measures]
                    words = f"{name}: {measure.replace('_', ' ')}"
                    rows.append([words, f"{share:.1%}", " - ".join(ends), *[""] * (len(columns) - 3)])
            asked = {key: value for key, value in asdict(settings).items() if key not in ("sampling", "batch_rows")}
            own = {"file": files[name]} if files[name] else {}  # another file is another measurement
            results[name] = {**found, **measures, "settings": {**asked, **asdict(sampling), **own}}
            shown += [(name, reply) for reply in replies]
    print_table(columns, rows, optional=("guessing", "too long", "cut off"))

    # ------------------------------------------------------------------ print one reply per task
    first = {} if config.table_only else dict(reversed(shown))  # the others are in the report
    for name, graded in reversed(first.items()):
        reply = {"role": "assistant", "content": graded.reply}
        print_chat(f"{name}, {'right' if graded.correct else 'wrong'}", [*graded.messages, reply])

    # ------------------------------------------------------------------ merge with earlier tasks of this step
    stage = config.source.partition("/")[0]  # of sft/TAG/step_100, too
    if device.is_main:
        samples = [
            {"task": name, "messages": one.messages, "reply": one.reply, "correct": one.correct} for name, one in shown
        ]
        report: dict[str, Any] = {"step": meta["step"], "tasks": results, "samples": samples}
        path = run_dir(stage, tag) / "chat_eval.json" if stage in STAGES else None
        if path:
            report = merge(path, report)

        # A chat of several turns for the report, sampled as for users; one chat per step.
        if config.show and meta["stage"] != "base" and not report.get("chat"):
            own = SamplingParams(**meta["sampling"])
            report["chat"] = short_chat(engine, own, config.max_tokens)
            if not config.table_only:
                print_chat("a chat:", report["chat"])
        everything = report["tasks"]
        report["chatcore"] = chat_core((task["accuracy"], task["baseline"]) for task in everything.values())
        earlier = sum(task is not results.get(name) for name, task in everything.items())
        before = f", {earlier} of them evaluated before" if earlier else ""
        print0(f"\nChatCORE: {report['chatcore']:.4f}, the mean over {counted(len(everything), 'task')}{before}")
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(report, indent=1, ensure_ascii=False), encoding="utf-8", errors="replace")
    if stage in STAGES:
        record(stage, tag, began, device)
    devices.shutdown(device)


def print_chat(title: str, messages: list[Any]) -> None:
    from nanochat.evals.chat_tasks import readable

    print0(f"\n{title}")
    for message in messages:
        print0(f"  {message['role']}: {readable(message['content'])}".replace("\n", "\n    "))


def merge(path: Path, report: dict[str, Any]) -> dict[str, Any]:
    """The report, merged with the results of the same step in the file.

    A task that the file has with other settings stays as it is: a quick look must not replace a long evaluation.
    """
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if earlier["step"] != report["step"]:
            return report
        tasks = dict(earlier["tasks"])
        if not all({"accuracy", "baseline", "settings"} <= set(task) for task in tasks.values()):
            raise ValueError("a task lacks its accuracy, baseline or settings")
        replaced = []
        for name, task in report["tasks"].items():
            kept, now = tasks.get(name, task)["settings"], task["settings"]
            if differences := [f"{key} {kept[key]}, not {now.get(key)}" for key in kept if kept[key] != now.get(key)]:
                line = f"{path} keeps its result with {'; '.join(differences)} (remove the file to replace it)"
                print0(f"\n{name}: {line}")
            else:
                tasks[name] = task
                replaced.append(name)
        samples = [sample for sample in earlier["samples"] if sample["task"] not in replaced]
        samples += [sample for sample in report["samples"] if sample["task"] in replaced]
    except FileNotFoundError:
        return report
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        warn(f"{path} is damaged ({error!r}); it is replaced")
        return report
    return {**report, "tasks": tasks, "samples": samples, "chat": earlier.get("chat", [])}


if __name__ == "__main__":
    run(main, Config, shows_progress=True)
