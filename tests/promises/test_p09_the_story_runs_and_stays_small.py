"""P9. The story runs, and stays small.

Every public function of the story's files has a part in a run: story_worker.py breaks one after the other, and the
weights, metrics or replies of a command change. On a CPU the quick form breaks the model and its updates in a few
commands, the soak all files in every command; on the simulated NPU another soak breaks the model and its updates. The
rings' import rules, the budget and the eight dependencies are in test_house.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_house import STORY

WORKER = Path(__file__).with_name("story_worker.py")

# What the commands of story_worker.py do not call, and what has no say in any of them: where it has one.
EXEMPT = {
    "on an accelerator": """
        device.Device.free_memory device.Device.synchronize device.Device.total_memory device.Runtime.decoders
        device.Runtime.peak_flops device.Runtime.records
    """,
    "without --num_iterations and --total_batch_size": """
        scaling.scaling_parameters scaling.training_tokens scaling.reference_tokens scaling.batch_tokens
    """,
    "without --dtype": "device.Runtime.has_bfloat16 device.Runtime.may_round",
    "between processes": "device.shutdown optim.Optimizer.before_backward",
    "in what a run costs": """
        device.Device.peak_memory device.Runtime.start gpt.Embedding.reset_parameters attention.KVCache.capacity
        operators.TorchKernels.loss_tokens engine.round_up scaling.flops_per_token
    """,
    "in models of other families": """
        gpt.GPTConfig.letter gpt.Norm.gain tokenizer.Tokenizer.encode_continuation
        tokenizer.Tokenizer.with_chat_template
    """,
    "with adapters": """
        train.make_adamw checkpoint_manager.Preparation.configure
        checkpoint_manager.Preparation.fill checkpoint_manager.Preparation.reshape
    """,
    "with a flag": """
        gpt.GPT.recompute_activations optim.Mean.store device.Device.set_rng_state mixture.last_turn
    """,
    "with a reward model": "conversation.render",
    "in the server": """
        engine.Slots.bytes_per_slot engine.Slots.copy engine.Slots.read engine.Slots.reset engine.Slots.shrink
    """,
    "in a model that calls the tool": "engine.Engine.answer_call calculator.can_continue",
    "in other tasks": """
        task.Environment.reference_reply task.Task.measures task.Task.wrong tokenizer.Tokenizer.shrink
    """,
    "at the end": "loader.Loader.close",
    "in a message": """
        conversation.Rendered.target_count device.Device.versions device.Runtime.versions device.explain
        optim.Optimizer.state_bytes task.Task.where
    """,
    "is never true": "mixture.MixtureCorpus.block_count",
}
# A simulated NPU replaces the operators that call these, and packs no weights.
ONLY_ON_A_CPU = """
    attention.Segments.first_key attention.blockwise_attention attention.causal_mask
    gpt.GPT.head_weight
"""
# The quick form's commands, and what only others call.
MODEL_COMMANDS = "tok,base,mid,sft,fp32"
ELSEWHERE = "gpt.ScalarHead.forward gpt.GPT.gradient_order"
REFUSALS = ("require_", "check_")  # functions that do nothing but raise


def verdicts(device: str, commands: str, *files: str, left_out: str = "") -> dict[str, str]:
    """What became of these commands with each function of these files broken, by the function's name; `left_out` are
    names of functions that are not."""
    command = [sys.executable, str(WORKER), device, commands, *files]
    if device == "npu":
        command = [str(WORKER.parents[1] / "simnpu/run"), *command]
    path = os.pathsep.join([str(WORKER.parents[2]), str(WORKER.parent)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "LEFT_OUT": left_out}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert len(found) > 30
    return found


def require_parts(found: dict[str, str], more: str = "") -> set[str]:
    """Every function has a part in a run, except EXEMPT and `more`. Returns the exempt functions that have one."""
    useless = {name for name, verdict in found.items() if verdict in ("nothing", "is not called")}
    useless = {name for name in useless if not name.rpartition(".")[2].startswith(REFUSALS)}
    exempt = {name for names in (*EXEMPT.values(), more) for name in names.split()}
    assert sorted(useless - exempt) == []
    return exempt - useless


@pytest.mark.slow
def test_a_model_is_what_the_story_shows():
    exempt = " ".join((*EXEMPT.values(), ELSEWHERE))  # the soak tries these, too
    found = verdicts("cpu", MODEL_COMMANDS, "gpt", "attention", "optim", left_out=exempt)
    require_parts(found)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_every_function_of_the_story_has_its_part_in_a_run():
    assert sorted(require_parts(verdicts("cpu", "all", *STORY.split()))) == [], "they have a part, or no longer exist"


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_the_model_is_the_same_code_on_an_npu():
    require_parts(verdicts("npu", "all", "gpt", "attention", "optim"), ONLY_ON_A_CPU)
