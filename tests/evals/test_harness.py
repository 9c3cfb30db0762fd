"""nanochat.evals.harness: the numbers of lm-evaluation-harness's own `hf` model, for our models and imported ones."""

import json
import re
import sys
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import cpu_device, lively_model, save_checkpoint, tiny_config, tiny_tokenizer
from tiny_families import save_family

from nanochat import cli, paths
from nanochat.device import Device
from nanochat.families import hf
from nanochat.families.imported_tokenizer import ImportedTokenizer
from nanochat.sharding import whole_weights
from scripts import export, lm_eval

pytest.importorskip("lm_eval", reason="the extra `eval` brings the harness")
pytest.importorskip("transformers", reason="the extra `dev` brings transformers")

from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402

from nanochat.evals.harness import NanochatLM, Tasks  # noqa: E402

CONTEXT = 160
STORY = "Once upon a time there was a small boat. It's the boat's sail, 从前有一条小船 - "
SEA = [
    {"question": "The boat had", "choices": ["a red sail", "the other", " two masts"], "answer": 0, "text": STORY},
    {"question": "then the sail ", "choices": ["an", "and the", "x"], "answer": 2, "text": STORY * 5},
    {"question": STORY * 4, "choices": ["the", "3 patches", "e\u0301 从"], "answer": 1, "text": "从前<|bos|>"},
    {"question": "12 + 34", "choices": ["= 46", " = 4", "7"], "answer": 0, "text": "the <|im_end|> </s>"},
]
TASKS = {
    "sea_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
fewshot_split: test
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: brier_score}]
""",
    "sea_until": """
output_type: generate_until
doc_to_text: "Q: {{question}} A:"
doc_to_target: "{{choices[answer]}}"
fewshot_split: test
generation_kwargs: {until: [q, "3", " the"], max_gen_toks: 24}
metric_list: [{metric: exact_match}]
""",
    "sea_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
}
CASES = ("fast", "qwen3", "hf:qwen3", "hf:qwen3 wide", "hf:llama3", "hf:mistral")


def call(script: Any, *argv: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script", *argv])
        cli.run(script.main, script.Config)


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what takes seconds and is not compared: 15,000 tasks, facts about the machine, resampled errors."""
    monkeypatch.setattr("nanochat.evals.harness.Tasks.__init__", partialmethod(Tasks.__init__, include_defaults=False))
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    monkeypatch.setattr("lm_eval.evaluator.simple_evaluate", partial(simple_evaluate, bootstrap_iters=0))


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    quicken(monkeypatch)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "sea.jsonl").write_text("".join(json.dumps(line) + "\n" for line in SEA))
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/sea.jsonl}}}}\ntest_split: test\n"
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}{text}")
    return folder


def make(case: str, folder: Path) -> tuple[str, Path]:
    """A model: its --source, and a folder with it that transformers reads."""
    if case.startswith("hf:"):
        family, _, wide = case.removeprefix("hf:").partition(" ")
        out = save_family(folder / family, family)
        ids = ImportedTokenizer.from_folder(out, json.loads((out / "tokenizer.json").read_text())).vocab_size
        shape = {"qwen3": "qwen3", "llama3": "llama", "mistral": "llama"}[family]
        rows = ids + 40 if wide else ids
        model = lively_model(tiny_config(vocab_size=rows, sequence_len=CONTEXT, **tiny.SHAPES[shape]))
        if wide:
            model.embedding.weight.data[ids:] *= 1.5  # rows beyond the tokenizer, as each Qwen has: some are written
        if model.head is not None:
            # `hf` writes on after a begin token, and shows bytes that are no UTF-8 otherwise: neither may be chosen.
            names = json.loads((out / "tokenizer.json").read_text())["model"]["vocab"]
            unwanted = [index for name, index in names.items() if name.startswith(("<0x", "<s>"))]
            model.head.weight.data[[*unwanted, ids - 7 if family == "llama3" else 1]] = 0
        hf.write_weights(out, model.config, whole_weights(model), torch.float32)
        described = hf.from_config(model.config, {"qwen3": "qwen3"}.get(family, "llama"))
        (out / "config.json").write_text(json.dumps({**described, "dtype": "float32"}))
        return str(out), out
    shape = {"fast": {"norm_weight": False}, "qwen3": tiny.SHAPES["qwen3"]}[case]
    model = lively_model(tiny_config(vocab_size=tiny_tokenizer().vocab_size, sequence_len=CONTEXT, **shape))
    save_checkpoint(paths.checkpoint_dir("sft", case), 1, model, tiny_tokenizer(), {"stage": "sft"})
    out = folder / case
    call(export, "--to", "hf", "--source", "sft", "--model_tag", case, "--out", str(out))
    return "sft", out


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_the_hf_model(base: Path, tasks: Path, case: str, capsys: Any):
    """As texts to continue, and as chats with a solved example: each answer, and what the harness makes of them."""
    from lm_eval.models.huggingface import HFLM  # here: the ranks of the next test import this file, too

    source, folder = make(case, base)
    theirs = HFLM(str(folder), dtype="float32", device="cpu", trust_remote_code=case == "fast", batch_size=3)
    flags = ["--source", source, "--include_path", str(tasks), "--tasks", "sea_*", "--device_batch_size", "3"]
    chat_flags = ["--num_fewshot", "1", "--apply_chat_template", "--system", "Be brief."]
    chat_options = {
        "num_fewshot": 1, "apply_chat_template": True, "fewshot_as_multiturn": True, "system_instruction": "Be brief.",
    }  # fmt: skip
    for more, options in (([], {"fewshot_as_multiturn": False}), (chat_flags, chat_options)):
        call(lm_eval, *flags, *more, "--device", "cpu", "--log_samples", "--out", str(base / "out.json"))
        found = json.loads((base / "out.json").read_text())
        printed = capsys.readouterr().out
        assert "|sea_choice" in printed and "word_perplexity" in printed
        manager = Tasks(include_path=tasks)
        expected = simple_evaluate(theirs, tasks=sorted(TASKS), task_manager=manager, bootstrap_iters=0, **options)
        assert list(found["results"]) == list(expected["results"])
        for task in TASKS:
            pairs = list(zip(found["samples"][task], expected["samples"][task], strict=True))
            answers = [(mine["filtered_resps"], list(wanted["filtered_resps"])) for mine, wanted in pairs]
            assert len(answers) == len(SEA)
            assert all(mine["prompt_hash"] == wanted["prompt_hash"] for mine, wanted in pairs)
            for mine, wanted in answers:
                if task == "sea_until":
                    assert mine == wanted
                elif task == "sea_rolling":
                    assert mine == pytest.approx(wanted, abs=1e-3)  # the sum over several windows
                else:
                    assert [greedy for _, greedy in mine] == [greedy for _, greedy in wanted]
                    assert [logprob for logprob, _ in mine] == pytest.approx([one for one, _ in wanted], abs=1e-4)
            for name, value in expected["results"][task].items():
                close = value if isinstance(value, str) else pytest.approx(value, rel=1e-4)
                assert found["results"][task][name] == close, name
        replies = [answer for sample in found["samples"]["sea_until"] for answer in sample["filtered_resps"]]
        assert len(set(replies)) > 1 and max(map(len, replies)) > 3


def test_ranks_share_the_work(monkeypatch: pytest.MonkeyPatch):
    """What two ranks find together is what one finds, bit for bit. Rank 0 runs first; rank 1 hears of what it found."""
    model = lively_model(tiny_config(vocab_size=tiny_tokenizer().vocab_size, sequence_len=64))
    pairs = [("the", " other"), ("then", " the an"), ("", "x"), ("从", "从"), ("a" * 99, "b")]
    scored = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    settings = [{"until": ["e"], "max_gen_toks": 1 + 7 * number, "temperature": number} for number in range(len(pairs))]
    begun = [Instance("generate_until", {}, (pair[0], one), 0) for pair, one in zip(pairs, settings, strict=True)]
    heard: list[Any] = []

    def gather(value: Any, device: Device) -> list[Any]:
        value = json.loads(json.dumps(value))
        if device.world_size == 1:
            return [value]
        if device.rank == 0:
            heard.append(value)
            return [value]
        assert len(value) == 2  # of 5; rank 0 has the others
        return [heard.pop(0), value]

    monkeypatch.setattr("nanochat.evals.harness.gather_values", gather)

    def answers(rank: int, world_size: int) -> list[Any]:
        device = cpu_device(rank=rank, world_size=world_size)
        lm = NanochatLM(model, tiny_tokenizer(), device, batch_rows=1)
        return [lm.loglikelihood(scored), lm.generate_until(begun)]

    alone = answers(0, 1)
    answers(0, 2)
    assert answers(1, 2) == alone and not heard
    assert len(alone[1][0]) <= 1 < max(map(len, alone[1]))  # max_gen_toks of each, not of all


def test_a_task_that_draws_its_replies_and_one_with_solved_examples(base: Path, tasks: Path):
    make("qwen3", base)
    flags = ["--source", "sft", "--include_path", str(tasks), "--tasks", "sea_until", "--device", "cpu"]
    flags += ["--log_samples", "--limit", "2", "--num_fewshot", "1", "--out", str(base / "out.json")]

    def replies(*more: str) -> list[Any]:
        call(lm_eval, *flags, "--gen_kwargs", "do_sample=true,temperature=3,max_gen_toks=9", *more)
        samples = json.loads((base / "out.json").read_text())["samples"]["sea_until"]
        assert len(samples) == 2 and all("A: " in sample["arguments"][0][0] for sample in samples)
        return [sample["resps"] for sample in samples]

    assert replies() == replies() != replies("--seed", "7")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tasks", "sea_chioce"], "--tasks sea_chioce"),
        (["--tasks", ","], "names no task"),
        (["--tasks", "sea_choice", "--include_path", "/nowhere"], "--include_path /nowhere"),
        (["--tasks", "sea_lost"], "HF_ENDPOINT"),
        (["--tasks", "sea_until", "--gen_kwargs", "max_gen_toks=999"], "max_gen_toks=N"),
        (["--tasks", "sea_choice", "--apply_chat_template"], "base model"),
    ],
)
def test_a_mistake_costs_one_line(base: Path, tasks: Path, capsys: Any, argv: list[str], message: str):
    model = lively_model(tiny_config(vocab_size=tiny_tokenizer().vocab_size))
    save_checkpoint(paths.checkpoint_dir("base", "tiny"), 1, model, tiny_tokenizer(), {"stage": "base"})
    text = (tasks / "sea_choice.yaml").read_text().replace("sea_choice", "sea_lost").replace("sea.jsonl", "no.jsonl")
    (tasks / "sea_lost.yaml").write_text(text)
    with pytest.raises(SystemExit) as stopped:
        call(lm_eval, "--source", "base", "--include_path", str(tasks), "--device", "cpu", *argv)
    err = capsys.readouterr().err
    line = err.splitlines()[-1]
    assert stopped.value.code == 1 and line.startswith("error: ") and message in line and "Traceback" not in err


def test_without_the_harness_one_line_names_the_extra(capsys: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit):
        call(lm_eval, "--tasks", "arc_easy")
    assert '".[eval]"' in capsys.readouterr().err


@pytest.mark.parametrize("page", ["evaluate.md", "evaluate.zh.md"])
def test_the_task_of_the_documentation_runs(base: Path, page: str, monkeypatch: pytest.MonkeyPatch, capfd: Any):
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    parts = {kind: re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("yaml", "json", "bash")}
    (base / "my_tasks").mkdir()
    (base / "my_tasks" / "two_digits.yaml").write_text(parts["yaml"][0])
    (base / "my_tasks" / "two_digits.jsonl").write_text(parts["json"][0])
    monkeypatch.chdir(base)
    make("fast", base)
    call(lm_eval, *parts["bash"][1].split()[3:], "--device", "cpu")
    shown = capfd.readouterr()
    assert "|two_digits" in shown.out
    assert "not a git repository" not in shown.err
