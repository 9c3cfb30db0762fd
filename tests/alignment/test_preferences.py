"""Preferences as micro-batches: the share of each rank, and the replies that KTO's baseline is measured on."""

from dataclasses import replace

import pytest
import torch
from tiny import cpu_device, lively_model, tiny_config

from nanochat.alignment import preferences
from nanochat.alignment.kto import gain_sum, judged_batches, kl_baseline, kto_loss, to_other_questions
from nanochat.conversation import Rendered
from nanochat.mixture import JudgedReply


def reply(question: list[int], answer: list[int], is_good: bool = True) -> JudgedReply:
    return JudgedReply(Rendered([*question, *answer], [0] * len(question) + [1] * len(answer), cut=False), is_good)


def test_a_reply_goes_to_the_next_other_question():
    replies = [reply([1, 2], [3]), reply([1, 2], [4, 5], False), reply([6], [7, 8, 9])]
    moved = to_other_questions(replies, max_tokens=4)
    assert [(one.rendered.ids, one.rendered.mask, one.rendered.cut) for one in moved] == [
        ([1, 2, 7, 8], [0, 0, 1, 1], True),
        ([1, 2, 7, 8], [0, 0, 1, 1], True),
        ([6, 3], [0, 1], False),
    ]
    assert to_other_questions(replies[:2], max_tokens=4) == []


def test_first_examples_that_cannot_teach_are_reported(capsys):
    preferences.report_first([[reply([1], [2]), reply([1], [3], False)]], 9)
    assert capsys.readouterr().err == ""
    long = replace(reply([1], [2]).rendered, cut=True)
    preferences.report_first([[JudgedReply(long, True)], [reply([1], [2])]], 9)
    cut, labels = capsys.readouterr().err.splitlines()
    assert "1 of the first 2 replies" in cut and "--max_seq_len" in cut and "labelled good" in labels


def test_the_ranks_shares_of_labelled_replies_are_the_whole():
    model, reference = lively_model(tiny_config()), lively_model(tiny_config(), seed=7)
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 12, (9,), generator=generator).tolist()
    examples = [
        [reply([number, 50, 51], torch.randint(0, 100, (n,), generator=generator).tolist(), number % 3 > 0)]
        for number, n in enumerate(lengths)
    ]
    device = cpu_device()

    def total(world_size: int, rows: int) -> torch.Tensor:
        """Loss, replies and the sums of the log on all ranks."""
        stats = torch.zeros(5)
        sums = torch.zeros(3)
        for rank in range(world_size):
            mine = replace(device, rank=rank, world_size=world_size)
            batches = judged_batches(examples, 32, rows, mine)
            for batch in preferences.compared(batches, reference):
                loss, count = kto_loss(model, batch, baseline=0.5, stats=stats)
                sums += torch.stack((loss, count, gain_sum(model, batch)[0])).detach()
        return torch.cat((sums, stats))

    alone = total(1, 100)
    assert alone[[1, 3, 4]].tolist() == [9, 6, 3]
    for world_size, rows in ((1, 1), (2, 2), (3, 1)):
        torch.testing.assert_close(total(world_size, rows), alone)
    few, many = (kl_baseline(model, reference, examples, 32, rows, device) for rows in (1, 9))
    assert few == pytest.approx(many, rel=1e-5)
    assert kl_baseline(model, model, examples, 32, 9, device) == 0
    assert kl_baseline(model, reference, examples[:1], 32, 9, device) == 0  # there is no other question
