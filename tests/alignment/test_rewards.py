"""Rewards by functions of the user's own: what they receive, what they may return, and what goes wrong in one line."""

import dataclasses
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from test_rollout import Echoing, Length, make_engine, questions
from tiny import complaint, cpu_device, run_ranks

from nanochat import rollout
from nanochat.alignment import rewards
from nanochat.alignment.rewards import Episode, FunctionReward, load_rewards, parse_rewards, reward_fingerprints, score
from nanochat.device import Device
from nanochat.ground import user_code
from nanochat.ground.cli import Failed, Interrupted
from nanochat.rollout import Reward, Samples
from nanochat.task import Environment
from nanochat.tasks.flag import Reading, open_mixture

MINE = """
import asyncio, neighbour, sys, time

def length(episodes):
    return [len(episode.reply) for episode in episodes]

async def waits(episodes):
    async def one(episode):
        await asyncio.sleep(0)
        return neighbour.HALF
    return await asyncio.gather(*map(one, episodes))

async def never(episodes):
    await asyncio.sleep(60)

def blocks(episodes):
    time.sleep(60)

def leaves(episodes):
    sys.exit()

def fails(episodes):
    return [1 / len(episode.fields) for episode in episodes]

def nan(episodes):
    return [0.0] * len(episodes)

constant = 3
"""
ROOT = Path(__file__).resolve().parents[2]
EPISODE = Episode([{"role": "user", "content": "q"}], "abc", None, {}, "task", 0.25, 3, "complete")


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mine")
    (folder / "neighbour.py").write_text("HALF = 0.5")
    (folder / "mine.py").write_text(MINE)
    return folder / "mine.py"


def values(mine: Path, entry: str, count: int = 2, **options: Any) -> list[float]:
    (reward,) = parse_rewards(entry.replace("mine.py", str(mine)))
    assert isinstance(reward, FunctionReward)
    return score(reward, [EPISODE] * count, **{"seconds": 5.0, **options})


def test_a_function_returns_a_number_for_each_episode(mine):
    (task,) = parse_rewards("task")
    played: Any = [SimpleNamespace(reward=0.25)] * 2
    assert task.rate(played, 1.0, lambda: False) == [0.25, 0.25]
    assert values(mine, "mine.py:length") == [3.0, 3.0]
    assert values(mine, "mine.py:waits:0.1") == [0.5, 0.5], "async, with a module next to it; the weight comes later"
    assert values(mine, "mine.py:nan") == [0.0, 0.0], "a function's name, and no weight"
    assert values(mine, "mine.py:fails", count=0) == [], "a process without episodes calls nothing"
    for made in (np.arange, torch.arange):
        own = FunctionReward("own", function=lambda episodes, made=made: made(len(episodes)))
        assert score(own, [EPISODE] * 3, 1.0) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("fails", r"fails.*mine.py:\d+ `return \[1 / len.*ZeroDivisionError"),
        ("leaves", r"fails.*`sys.exit\(\)`: SystemExit$"),
        ([1.0], "1 values for 2 episodes"),
        ([0.5, float("nan")], "nan for episode 1"),
        ([0.5, "1"], "'1' for episode 1"),
        ([10**400] * 2, "100000.* for episode 0: not a number up to 1e"),
        (None, "NoneType for 2 episodes"),
    ],
)
def test_what_a_function_does_wrong_is_one_line(mine, entry, words):
    with pytest.raises(Failed, match=words) as caught:
        if isinstance(entry, str):
            values(mine, f"mine.py:{entry}")
        else:
            score(FunctionReward("own", function=lambda episodes: entry), [EPISODE] * 2, 1.0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["never", "blocks"])
def test_a_function_that_waits_can_be_stopped(mine, name):
    with pytest.raises(Failed, match=f"{name}.*--hang_seconds 0.2"):
        values(mine, f"mine.py:{name}", seconds=0.2)
    with pytest.raises(Interrupted) as caught:
        values(mine, f"mine.py:{name}", should_stop=lambda: True)
    assert not isinstance(caught.value, Failed)


def test_what_the_flag_may_say(mine, tmp_path, monkeypatch):
    parts = parse_rewards(f"task:0.5, {mine}:length:-0.1,{mine}:waits")
    assert [(part.name, part.weight) for part in parts] == [("task", 0.5), ("length", -0.1), ("waits", 1.0)]
    sums = reward_fingerprints(parts)
    assert sums.pop("--reward") == f"task:0.5,{mine}:length:-0.1,{mine}:waits"
    assert set(sums) == {f"--reward {mine}:length", f"--reward {mine}:waits"} and all(map(len, sums.values()))
    (tmp_path / "broken.py").write_text("def score(episodes:\n    pass\n")
    (tmp_path / "raises.py").write_text("import nosuchmodule\n")
    for text, word in {
        "": "empty", "nosuch": "none of task", f"{tmp_path}/gone.py:f": "no file", f"{mine}:lengt": "length, waits",
        f"{mine}:constant": "not a function", f"{mine}:length:0": "weight", f"task:nan,{mine}:length": "weight",
        "task:1e308": "weight",
        f"{mine}:length,{mine}:length:2": "length twice", f"{tmp_path}/broken.py:score": "broken.py:1 `def score",
        f"{tmp_path}/raises.py:f": "nosuchmodule",
    }.items():  # fmt: skip
        assert word in complaint(lambda text=text: parse_rewards(text))


def test_a_models_reward_has_the_name_of_its_folder(monkeypatch, capsys):
    """Its tag in the log, and its step for a resumed run, also where --reward names the tag written last."""
    folders = {"rm": Path("/c/rm/new/step_000002"), "rm/old": Path("/c/rm/old/step_000001")}
    monkeypatch.setattr(rewards, "find_source", lambda source, device, flag: folders[source])
    monkeypatch.setattr(rewards, "weights_sha256", lambda folder: f"sum of {folder.parent.name}")

    def rate(model: Path, *_: Any):
        return lambda conversations: [float(model.name[-1])] * len(conversations)

    monkeypatch.setattr(rewards, "load_folder", lambda folder, device: (folder, None, {}))
    monkeypatch.setattr(rewards, "rating", rate)
    new, old = parts = load_rewards(parse_rewards("rm:rm:2,rm:rm/old"), cpu_device())
    assert capsys.readouterr().out == "reward rm:rm: rm/new/step_000002\nreward rm:rm/old: rm/old/step_000001\n"
    assert (new.name, new.weight, score(new, [EPISODE], 1.0)) == ("rm", 2.0, [2.0])
    assert (old.name, old.weight, score(old, [EPISODE], 1.0)) == ("old", 1.0, [1.0])
    assert reward_fingerprints(parts) == {
        "--reward": "rm:rm/new/step_000002:2,rm:rm/old/step_000001",
        "--reward rm:rm/new/step_000002": "sum of new", "--reward rm:rm/old/step_000001": "sum of old",
    }  # fmt: skip
    folders["rm"] = folders["rm/old"]
    assert load_rewards(parse_rewards("rm:rm,rm:rm/old"), cpu_device())
    folders["rm/new"] = folders["rm/old"]
    assert "old twice" in complaint(lambda: load_rewards(parse_rewards("rm:rm/new,rm:rm/old"), cpu_device()))


def test_prompts_need_no_answer(mine, tmp_path):
    """Rows as trl and verl have them: a function finds their other fields, and an answer where there is one."""
    user = {"role": "user", "content": "Say a."}
    rows = [
        {"prompt": "Say a.", "solution": "a"},
        {"prompt": [user], "reward_model": {"ground_truth": "a"}},
        {"messages": [{"role": "system", "content": "Be brief."}, user]},
        {"question": "Say a.", "answer": 7},
        {"messages": [user, {"role": "assistant", "content": "a"}], "level": 2},
        {"prompt": [user, {"role": "assistant", "content": "I say "}], "completion": "a"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (task,) = open_mixture(str(tmp_path / "rows.jsonl"), "train", Reading(files="prompts", val_share=0.0)).tasks
    examples = [task.example(index) for index in range(len(task))]
    assert [example.question[-1] for example in examples[:5]] == [user] * 5
    assert [example.fields for example in examples] == rows
    assert [rewards.answer_of(example) for example in examples] == [None, None, None, 7, "a", "a"]
    (tmp_path / "none.jsonl").write_text('{"text": "a"}\n{"text": "b"}')
    assert "prompt" in complaint(lambda: open_mixture(str(tmp_path / "none.jsonl"), "train", Reading(files="prompts")))
    seen: list[Episode] = []
    own = FunctionReward("own", function=lambda episodes: seen.extend(episodes) or [0.0] * len(episodes))
    own.check([(task, examples[0]), (task, examples[4])], 1.0)
    assert [(one.reply, one.answer, one.task) for one in seen] == [("", None, "prompts"), ("a", "a", "prompts")]
    own.check([(task, examples[5])], 1.0)
    assert seen[-1].messages == [user, {"role": "assistant", "content": "I say a"}] and seen[-1].reply == "I say a"
    fails = FunctionReward("fails", function=lambda episodes: [1.0])
    assert "before training" in complaint(lambda: fails.check([(task, examples[0])] * 2, 1.0))


def sample(device: Device, parts: list[Reward], task: Any) -> Samples:
    engine = make_engine(device)
    return tiny.sample_episodes(
        rollout.EngineSampler(engine, 8), engine.tokenizer, device, questions(4, task), samples=2, max_tokens=10,
        context=64, seed=1, temperature=1.0, rewards=parts,
    )  # fmt: skip


def test_parts_are_weighed_and_a_broken_reply_is_worth_nothing_at_best():
    seen: list[Episode] = []

    def length(episodes: list[Episode]) -> list[float]:
        seen.extend(episodes)
        return [1.0 + len(episode.messages) for episode in episodes]

    drawn = sample(cpu_device(), [Reward("task", 0.5), FunctionReward("length", 2.0, function=length)], Echoing())
    assert all(list(one.reward_parts) == ["task", "length"] for one in drawn) and drawn.rewards.shape == (4, 2)
    tasks, lengths = (drawn.grid(lambda one, name=name: one.reward_parts[name]) for name in ("task", "length"))
    assert np.array_equal(drawn.rewards, 0.5 * tasks + 2.0 * lengths)
    endings = [one.ending for one in drawn]
    assert "broken" in endings and len(set(endings)) > 1
    for ending, value in zip(endings, lengths.flat, strict=True):
        assert (value == 0) == (ending == "broken")
    for episode in seen:
        roles = [message["role"] for message in episode.messages]
        assert roles[:2] == ["user", "assistant"] and episode.task == "length" and episode.answer in range(4)
        assert episode.reward in (0.0, 1.0, 3.0, 6.0) and episode.tokens > 0
    halves = [half.grid(lambda one: one.reward_parts["length"]) for half in drawn.split(2)]
    assert [half.shape for half in halves] == [(2, 2)] * 2 and np.array_equal(np.vstack(halves), lengths)
    negative = sample(cpu_device(), [FunctionReward("own", function=lambda episodes: [-1.0] * len(episodes))], Length())
    assert (negative.rewards == -1).all(), "also of broken replies: they would be the best ones"


def failing_on_rank_1(device: Device) -> str:
    def function(episodes: list[Episode]) -> list[float]:
        return [1.0 / (1 - device.rank)] * len(episodes)

    with pytest.raises(Failed) as caught:
        sample(device, [FunctionReward("own", function=function)], Length())
    return str(caught.value)


@pytest.mark.slow
def test_all_ranks_learn_of_a_failure():
    reasons = run_ranks(failing_on_rank_1, world_size=2)
    assert reasons[0] == reasons[1] and "ZeroDivisionError" in reasons[0]


def test_an_environments_own_mistake_is_one_line(tmp_path):
    file = tmp_path / "game.py"
    file.write_text("def step(reply):\n    return {}['no such key']\n")
    step = user_code.load("--tasks", f"{file}:step")

    class Failing(Echoing):
        def environment(self, example):
            game = {"start": lambda self: example.question, "step": lambda self, reply: step(reply)}
            return type("Game", (Environment,), game)(random.Random(0))

    with pytest.raises(Failed, match=r"game.py:2 `return.*KeyError"):
        sample(cpu_device(), [Reward()], Failing())


def test_the_functions_of_the_page_run(tmp_path):
    """docs/rl.md, the same code in both languages."""
    english, chinese = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("rl.md", "rl.zh.md"))
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", english, re.DOTALL)
    assert blocks == re.findall(r"```python\n# (\S+)\n(.*?)```", chinese, re.DOTALL)
    for name, code in blocks:
        (tmp_path / name).write_text(code)
    episode = replace(EPISODE, reply="It is 7.", fields={"solution": "7"})
    brief, solved = parse_rewards(f"{tmp_path}/mine.py:is_brief,{tmp_path}/mine.py:has_solution")
    episodes = [episode, replace(episode, reply="x" * 80)]
    assert score(brief, episodes, 1.0) == score(solved, episodes, 1.0) == [1.0, 0.0]
    fields = re.findall(r"^\| `(\w+)` \|", english.partition("## An environment")[0], re.MULTILINE)
    assert set(fields) == {field.name for field in dataclasses.fields(Episode)}
