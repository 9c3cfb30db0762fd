"""The matrices of other families that are stacked in each of ours, as adapters and weights in files have them."""

from nanochat.gpt import GPTConfig


def stacked_matrices(config: GPTConfig) -> dict[str, dict[str, int]]:
    """The matrices of a block by their modules: those that are stacked in each, in this order, with their numbers of
    rows."""
    kv = config.n_kv_head * config.head_dim
    gate = {"gate_proj": config.mlp_width} if config.mlp == "swiglu" else {}
    return {
        "attention.qkv": {"q_proj": config.n_head * config.head_dim, "k_proj": kv, "v_proj": kv},
        "attention.output": {"o_proj": config.width},
        "mlp.input": {**gate, "up_proj": config.mlp_width},
        "mlp.output": {"down_proj": config.width},
    }
