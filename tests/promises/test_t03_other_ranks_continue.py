"""T3. Resuming at another world size loses and repeats no document.

Each stage trains on one rank. The same run then begins on two ranks, is killed, continues on two ranks of another
layout, is killed again and ends on one. The loss of every step shows which documents it read: all are equal up to
rounding, as are the final weights.
"""

import pytest
from runs import SHARDS, SHARED_ROWS, TINY, WHOLE, metrics, resume
from test_t02_resuming_is_exact import flags_of

ONE_TO_TWO_TO_ONE = (1, 2, 2, 1)


@pytest.mark.slow
def test_pretraining(base, tokenizer):
    """Three layers at the rule's rates: where rounding is amplified, it shows here first."""
    flags = [flag for flag in TINY if not flag.startswith("--depth")]
    flags += ["--depth=3", "--window_pattern=SL", "--seed=1", "--num_iterations=9", "--save_every=3", "--eval_every=4"]
    layout = ("", WHOLE, SHARDS, "")
    straight = resume(base, "base", flags, (0, 3, 6), ranks=ONE_TO_TWO_TO_ONE, layout=layout)
    assert [line["step"] for line in metrics(base, "base")] == list(range(9))
    assert straight.printed.count("device: 1 x ") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "extra", "first", "then"),
    [
        ("mid", (), SHARED_ROWS, WHOLE),
        ("sft", (), SHARDS, SHARED_ROWS),
        ("dpo", (), WHOLE, SHARDS),
        ("rl", (), SHARDS, SHARED_ROWS),
        ("rl", ("--loss=ppo",), SHARED_ROWS, WHOLE),
    ],
    ids=["mid", "sft", "dpo", "rl", "ppo"],
)
def test_later_stages(taught, stage, extra, first, then):
    def how(layout: str) -> str:
        """Two ranks that do not share rows have half of the rows each."""
        fewest = 2 if stage == "dpo" else 1
        return layout if layout == SHARED_ROWS else f"{layout} --device_batch_size={fewest}"

    flags = (*flags_of(stage, taught), *extra, "--num_iterations=6", "--eval_every=3", "--save_every=2")
    layout = ("", how(first), how(then), "")
    resume(taught, stage, flags, (0, 2, 4), ranks=ONE_TO_TWO_TO_ONE, layout=layout)
    if stage == "rl":  # there was something to learn
        assert sum(line["no_signal"] < 1 for line in metrics(taught, "rl")) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["rl", *(pytest.param(s, marks=pytest.mark.soak) for s in ("mid", "sft", "dpo"))])
def test_replicas_of_shards(taught, stage):
    """Four processes: two groups of two, activations computed twice."""
    flags = (*flags_of(stage, taught), "--num_iterations=3", "--eval_every=2")
    fewest = 2 if stage == "dpo" else 1
    hybrid = f"--parallel=fsdp --replicate=2 --activation_checkpointing --device_batch_size={fewest}"
    resume(taught, stage, flags, (0,), ranks=(1, 4), layout=("", hybrid))
