"""The matrices of other families that are stacked in each of ours, as adapters and weights in files have them."""

from typing import Any

from nanochat.gpt import GPTConfig


def stacked_matrices(config: GPTConfig) -> dict[str, dict[str, int]]:
    """The matrices of a block by their modules: those that are stacked in each, in this order, with their numbers of
    rows. With states a block has only one of the two kinds of attention."""
    c = config
    kv = c.n_kv_head * c.head_dim
    queries = 2 * c.n_head if c.attention_gate else c.n_head
    matrices = {
        "attention.qkv": {"q_proj": queries * c.head_dim, "k_proj": kv, "v_proj": kv},
        "attention.output": {"o_proj": c.width},
    }
    if c.has_states:
        keys = c.state_key_heads * c.state_key_dim
        values = c.state_value_heads * c.state_value_dim
        heads = c.state_value_heads
        mixed = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        matrices |= {"attention.state_input": mixed, "attention.state_output": {"out_proj": c.width}}
    for mlp, width in {"mlp": c.mlp_width, "mlp.shared": c.shared_experts * c.mlp_width}.items():
        if width:
            gate = {"gate_proj": width} if c.mlp == "swiglu" else {}
            matrices |= {f"{mlp}.input": {**gate, "up_proj": width}, f"{mlp}.output": {"down_proj": c.width}}
    return matrices


def matrices_of(block: Any, config: GPTConfig) -> dict[str, dict[str, int]]:
    """Those of this block."""
    modules = dict(block.named_modules())
    return {path: parts for path, parts in stacked_matrices(config).items() if path in modules}
