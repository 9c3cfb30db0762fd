"""nanochat's model for transformers: AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).

`python -m scripts.export --to hf` copies this file next to the weights, so it imports only torch and transformers.
It computes the same as nanochat/gpt.py, which explains the reasons. tests/exported/test_export.py compares the two.

Tried with transformers 4.48, 4.57, 5.0, 5.23 and 5.24.

Legend: B batch, T new tokens, S cached and new tokens, C width, H query heads, K key/value heads, D head dim.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

# transformers calls the cache `past_key_values`, from 5.24 on `cache`. Both names are accepted as arguments; the output
# has the name that this version's `generate` looks for.
OUTPUT_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class NanochatConfig(PretrainedConfig):
    """The fields of nanochat's GPTConfig and what follows from them (scripts/export.py), as in config.json."""

    model_type = "nanochat"
    keys_to_ignore_at_inference = ["past_key_values", "cache", "last_hidden_state"]
    # The names that transformers and its caches use -> ours.
    attribute_map = {
        "hidden_size": "width", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
        "num_key_value_heads": "n_kv_head", "max_position_embeddings": "sequence_len", "intermediate_size": "mlp_width",
    }  # fmt: skip

    def __init__(self, **settings):
        # These are set first because the base class reads some of them. It stores the other settings as they are.
        for name in ("width", "n_layer", "n_head", "n_kv_head", "sequence_len", "mlp_width"):
            setattr(self, name, settings.pop(name, 0))
        super().__init__(**{"tie_word_embeddings": False, **settings})  # here a tied head is the embedding itself


class Norm(nn.Module):
    def __init__(self, config, size: int):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(size)) if config.norm_weight else None

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config, layer: int):
        super().__init__()
        self.config = config
        self.layer = layer
        H, K, D = config.n_head, config.n_kv_head, config.head_dim
        self.qkv = nn.Linear(config.width, (H + 2 * K) * D, bias=config.attention_bias)
        self.output = nn.Linear(H * D, config.width, bias=False)
        self.lookback = nn.Parameter(torch.zeros((H + K) * D)) if layer == 0 and config.lookback_heads else None
        has_norm = config.qk_norm != "none"
        self.q_norm = Norm(config, D) if has_norm else nn.Identity()
        self.k_norm = Norm(config, D) if has_norm else nn.Identity()
        has_gate = has_value_embedding(config, layer)
        self.value_gate = nn.Linear(min(32, config.width), K, bias=False) if has_gate else None
        self.scale = (config.qk_scale**2 if has_norm else 1.0) / math.sqrt(D)
        if config.qk_norm == "after_rotary":
            self.scale *= config.rotary_gain**2

    def forward(self, x, value, cos, sin, mask, cache):
        c = self.config
        B, T, _ = x.shape
        q, k, v = (
            self.qkv(x)
            .view(B, T, c.n_head + 2 * c.n_kv_head, c.head_dim)
            .split((c.n_head, c.n_kv_head, c.n_kv_head), dim=2)
        )
        if self.lookback is not None:
            biases = self.lookback.view(-1, c.head_dim)
            q, k = q + biases[: c.n_head], k + biases[c.n_head :]
        if c.qk_norm == "before_rotary":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if c.qk_norm == "after_rotary":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.value_gate is not None:
            gate = torch.sigmoid(self.value_gate(x[..., : self.value_gate.in_features]))  # (B, T, K)
            v = v + 3 * gate.unsqueeze(-1) * value.view(B, T, c.n_kv_head, c.head_dim)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, heads, T, D)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)  # (B, K, S, D)
        grouped = c.n_head != c.n_kv_head
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=grouped)
        return self.output(y.transpose(1, 2).reshape(B, T, -1))


def has_value_embedding(config, layer: int) -> bool:
    return config.value_embeddings and layer % 2 == (config.n_layer - 1) % 2


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def activate(x: Tensor, is_gated: bool) -> Tensor:
    """The inner activations of an MLP, from the product with its first matrix."""
    if not is_gated:
        return F.relu(x).square()
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class MLP(nn.Module):
    def __init__(self, config, size: int):
        super().__init__()
        self.is_gated = config.mlp == "swiglu"
        self.input = nn.Linear(config.width, (2 if self.is_gated else 1) * size, bias=False)
        self.output = nn.Linear(size, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(activate(self.input(x), self.is_gated))


class Experts(nn.Module):
    """Several MLPs, of which a router chooses a few for each token; their matrices are stacked in two parameters."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.is_gated = config.mlp == "swiglu"
        E, C, M = config.experts, config.width, config.mlp_width
        self.router = nn.Linear(C, E, bias=config.router == "sigmoid")  # its bias only takes part in the choice
        self.input = nn.Linear(C, E * (2 if self.is_gated else 1) * M, bias=False)
        self.output = nn.Linear(M, E * C, bias=False)
        self.shared = None
        if config.shared_experts:
            self.shared = MLP(config, config.shared_experts * M)

    def forward(self, x: Tensor) -> Tensor:
        c = self.config
        tokens = x.flatten(0, 1)
        logits = F.linear(tokens.float(), self.router.weight.float())
        scores = logits.log_softmax(dim=-1) if c.router == "softmax" else F.logsigmoid(logits)
        ranked = scores.exp()
        if self.router.bias is not None:
            ranked = ranked + (self.router.bias.float() - self.router.bias.float().mean())
        chosen = ranked.topk(c.experts_per_token, dim=-1).indices
        weights = scores.gather(1, chosen)
        weights = (weights.softmax(dim=-1) if c.router_normalized else weights.exp()).to(x.dtype)
        y = torch.zeros_like(tokens)
        inputs = self.input.weight.unflatten(0, (c.experts, -1))
        outputs = self.output.weight.unflatten(0, (c.experts, -1))
        for expert in range(c.experts):
            rows, place = torch.where(chosen == expert)
            inner = activate(F.linear(tokens[rows], inputs[expert]), self.is_gated)
            y.index_add_(0, rows, F.linear(inner, outputs[expert]) * weights[rows, place].unsqueeze(-1))
        y = y.view_as(x)
        return y if self.shared is None else y + self.shared(x)


class Block(nn.Module):
    def __init__(self, config, layer: int):
        super().__init__()
        self.attention_norm = Norm(config, config.width)
        self.attention = Attention(config, layer)
        self.mlp_norm = Norm(config, config.width)
        self.mlp = Experts(config) if getattr(config, "experts", 0) else MLP(config, config.mlp_width)

    def forward(self, x, value, cos, sin, mask, cache):
        x = x + self.attention(self.attention_norm(x), value, cos, sin, mask, cache)
        return x + self.mlp(self.mlp_norm(x))


class NanochatForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = NanochatConfig
    base_model_prefix = ""
    _no_split_modules = ["Block"]
    accepts_loss_kwargs = False  # transformers' Trainer divides the loss of a micro-batch by their number

    def __init__(self, config):
        super().__init__(config)
        rows = math.ceil(config.vocab_size / 64) * 64
        self.embedding = nn.Embedding(rows, config.width)
        self.embedding_norm = Norm(config, config.width) if config.embedding_norm else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = Norm(config, config.width)
        self.head = None if config.tied_head else nn.Embedding(rows, config.width)  # only for its weight
        self.value_embeddings = nn.ModuleDict()
        for layer in range(config.n_layer):
            if has_value_embedding(config, layer):
                self.value_embeddings[str(layer)] = nn.Embedding(rows, config.n_kv_head * config.head_dim)
        if config.residual_scales:
            self.residual_scales = nn.Parameter(torch.ones(config.n_layer))
            self.embedding_scales = nn.Parameter(torch.zeros(config.n_layer))
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def forward(
        self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, labels=None, use_cache=None,
        logits_to_keep=0, cache=None, **others,
    ):  # fmt: skip
        """Logits (B, T, V) of tokens (B, T); `attention_mask` (B, S) is 0 under padding, left of shorter rows.

        The loss is the mean over `labels`, the tokens whose next ones are the targets. A row is one document.

        Raises ValueError: when the mask is longer than the cached and new tokens. Then the call has a cache under
        another name, whose tokens would get no attention. And for rows of several documents.
        """
        c = self.config
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = DynamicCache()
        is_packed = self.training and position_ids is not None and bool((position_ids.diff() < 0).any())
        if is_packed or not others.keys().isdisjoint(("seq_idx", "cu_seq_lens_q", "cu_seqlens")):
            raise ValueError("modeling_nanochat.py does not separate the documents of packed rows: pad them instead")
        seen = 0 if cache is None else cache.get_seq_length()
        B, T = input_ids.shape
        if attention_mask is not None and attention_mask.shape[1:] != (seen + T,):
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, but {seen} cached and {T} new tokens need "
                f"({B}, {seen + T}): modeling_nanochat.py does not know how this call caches"
            )
        places = torch.arange(seen + T, device=input_ids.device)
        if position_ids is None:
            position_ids = places[seen:].expand(B, T)
            if attention_mask is not None:  # counted without the padding
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, seen:]

        x = self.embedding(input_ids)
        cos, sin = self._angles(position_ids, x.dtype)
        masks = self._masks(places, seen, attention_mask)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        first = x
        for layer, block in enumerate(self.blocks):
            if c.residual_scales:
                x = self.residual_scales[layer] * x + self.embedding_scales[layer] * first
            value = None
            if str(layer) in self.value_embeddings:
                value = self.value_embeddings[str(layer)](input_ids)
            x = block(x, value, cos, sin, masks[c.windows[layer]], cache)
        x = self.norm(x)
        if isinstance(logits_to_keep, int) and logits_to_keep:
            x = x[:, -logits_to_keep:]
        table = self.embedding if self.head is None else self.head
        logits = F.linear(x, table.weight[: c.vocab_size]).float()  # the other rows are padding
        if c.logit_cap:
            logits = c.logit_cap * torch.tanh(logits / c.logit_cap)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        output = CausalLMOutputWithPast(loss=loss, logits=logits)
        if cache is not None:
            output[OUTPUT_CACHE] = cache
        return output

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        gain = self.config.rotary_gain
        frequencies = torch.tensor(self.config.rotary_frequencies, device=positions.device)
        angles = positions[..., None].float() * frequencies  # (B, T, D / 2)
        angles = torch.cat((angles, angles), dim=-1)[:, :, None]  # (B, T, 1, D)
        return (angles.cos() * gain).to(dtype), (angles.sin() * gain).to(dtype)

    def _masks(self, places: Tensor, seen: int, attention_mask: Tensor | None) -> dict[int, Tensor]:
        """A mask (B or 1, 1, T, S) for each window, True where the query may attend to the key."""
        distance = places[seen:, None] - places  # (T, S)
        masks = {}
        for window in set(self.config.windows):
            mask = (distance >= 0) & ((distance < window) if window else True)
            if attention_mask is not None:
                # A padding token attends to itself: a softmax over no key is NaN.
                mask = mask & attention_mask[:, None, : len(places)].bool() | (distance == 0)
            masks[window] = mask[:, None] if mask.ndim == 3 else mask[None, None]
        return masks
