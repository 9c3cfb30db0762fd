"""The probe finds a planted mistake at its layer and by its name, and nothing where there is none."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from simnpu import build
from simnpu.forks import simulated
from test_scripts import call
from tiny import lively_model, tiny_config

from nanochat.cli import UserError
from nanochat.kernels.gradients import WrittenKernels
from nanochat.run.probe import Probe, WatchedKernels, first_difference
from nanochat.train import next_token_loss
from scripts import probe as script

TINY = ("--device=cpu", "--dtype=float32", "--depth=2", "--max_seq_len=32", "--vocab_size=64", "--steps=2")
ROOT = Path(__file__).resolve().parents[2]
CHAIN = str(ROOT / "tests/simnpu/chain.py")


def recording(kernels: WrittenKernels | None = None) -> list[dict[str, Any]]:
    watched: Any = WatchedKernels(kernels or WrittenKernels())
    model = lively_model(tiny_config(key_offset=True), kernels=watched)
    tokens = torch.randint(100, (2, 17), generator=torch.Generator().manual_seed(0))
    probe = Probe(model)
    loss, _ = next_token_loss(model, (tokens[:, :-1], tokens[:, 1:]))
    loss.backward()
    probe.end_step()
    return probe.to_json()


class Planted(WrittenKernels):
    """Kernels whose call number `number` of one operator is wrong."""

    def __init__(self, operator: str, number: int):
        super().__init__()
        self.left = number
        right = getattr(self, operator)

        def wrong(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
            self.left -= 1
            out = right(x, *rest, **options)
            return out if self.left else out.flip(-1)  # a permutation: the norm and the largest value stay

        setattr(self, operator, wrong)


def test_two_recordings_of_the_same_run_agree():
    assert first_difference(recording(), recording(), 0.0) is None


# rms_norm is called once for the embedding, then three times a layer (attention, q and k together, MLP).
@pytest.mark.parametrize(
    ("operator", "number", "expected"),
    [
        ("rotate", 2, "forward, blocks.1.attention: rotate"),
        ("offset_keys", 2, "forward, blocks.1.attention: offset_keys"),
        ("attention", 3, "forward, blocks.2.attention: attention"),
        ("rms_norm", 1, "forward, embedding_norm: rms_norm"),
        ("rms_norm", 6, "forward, blocks.1.attention.q_norm: rms_norm"),
    ],
)
def test_a_wrong_kernel_is_found_at_its_layer(operator: str, number: int, expected: str):
    line = first_difference(recording(), recording(Planted(operator, number)), 1e-4)
    assert line is not None and line.startswith(f"step 0, {expected}: signature")


def test_a_kernel_that_calls_another_is_read_as_one():
    """As on a device where it is one operator."""

    class Fused(WrittenKernels):
        def add_rms_norm(self, x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor | None, eps: float) -> Any:
            x = x + added
            return WrittenKernels().rms_norm(x, weight, eps), x

    readings = recording(Fused())
    assert first_difference(recording(), readings, 0.0) is None
    assert "blocks.0.mlp_norm: add_rms_norm" in {reading["name"] for reading in readings}


def test_a_wrong_gradient_is_found_in_the_backward_pass():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return 2 * grads[0]

    class Kernels(WrittenKernels):
        def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            return super().rotate(Doubled.apply(x), cos, sin)  # type: ignore[arg-type]

    line = first_difference(recording(), recording(Kernels()), 1e-4)
    # The last layer is the first one that a backward pass reaches.
    assert line is not None and line.startswith("step 0, backward, blocks.2.attention.qkv: norm")


def test_values_that_are_not_finite_are_counted_and_hide_nothing():
    class Broken(WrittenKernels):
        def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            out = super().rotate(x, cos, sin)
            return torch.where(torch.arange(out.numel()).view(out.shape) < 3, torch.nan, out)

    readings = recording(Broken())
    first = next(reading for reading in readings if reading["not_finite"])
    assert (first["name"], first["not_finite"]) == ("blocks.0.attention: rotate", 3)
    assert first["norm"] > 0  # of the others


def test_the_command_records_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one = str(tmp_path / "one.json")
    other = str(tmp_path / "other.json")
    call("probe", *TINY, f"--out={one}")
    call("probe", *TINY, f"--out={other}")
    call("probe", "--compare", one, other, "--tolerance=0")
    assert "readings agree" in capsys.readouterr().out

    recorded = json.loads(Path(other).read_text())
    assert recorded["versions"]["torch"] == torch.__version__ and recorded["kernels"]
    assert {reading["step"] for reading in recorded["readings"]} == {0, 1}
    call("probe", *TINY, "--seed=1", f"--out={other}")
    with pytest.raises(UserError, match="--seed"):
        script.main(script.Config(compare=(one, other)))
    Path(other).write_text("[]")
    with pytest.raises(UserError, match="not a recording"):
        script.main(script.Config(compare=(one, other)))
    with pytest.raises(UserError, match="--out"):
        script.main(script.Config())


@pytest.mark.slow
def test_a_simulated_npu_agrees_with_a_cpu(tmp_path: Path):
    """Three recordings in one process; bfloat16 products take a CPU long, so that their model is smaller."""
    cases = ("--dtype=float32", "--dtype=float32 --document_tokens=24", "--dtype=bfloat16 --depth=2")
    flags = {device: [f"--device={device} {case}" for case in cases] for device in ("cpu", "npu")}
    for place, flag in enumerate(flags["cpu"]):
        call("probe", *flag.split(), f"--out={tmp_path}/cpu{place}.json")
    commands = [f"probe {flag} --out={tmp_path}/npu{place}.json" for place, flag in enumerate(flags["npu"])]
    try:
        done = simulated([CHAIN, *commands])
    except build.Unavailable as reason:
        pytest.skip(f"no simulated NPU: {reason}")
    assert done.returncode == 0, done.stderr
    for place in range(len(cases)):
        call("probe", "--compare", f"{tmp_path}/cpu{place}.json", f"{tmp_path}/npu{place}.json")
