"""The gated delta rule: a memory of keys and values of fixed size, written and read token by token.

Each head has a matrix S (Dk, Dv). A token with key k, value v and query q makes it forget a little, then corrects what
it holds under k, and reads it under q:

    S = decay S
    S = S + k^T strength (v - k S)        v - k S: what the memory does not know yet
    y = q S

Source: Yang et al. 2024, Gated Delta Networks. Training reads whole rows by products of matrices, in chunks of 64
tokens (`chunked`); decoding takes one token at a time (`step`). Both compute in fp32.

Legend: B batch, T time, K key heads, G value heads per key head, N chunks, Dk and Dv channels of a key and a value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 64  # tokens; with 32 a row takes twice the launches, with 128 twice the products within chunks


def chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor | None, numbers: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q, k (B, T, K, Dk), v (B, T, K, G, Dv), log_decay and strength (B, T, K, G) -> y (B, T, K, G, Dv), and the state
    after the row (B, K, G, Dk, Dv).

    `state`: the one before the row; None: zero. With `numbers` (B, T), which differ between the documents of a row,
    the state begins anew with each document, and the one after the row means nothing.
    """
    # Within a chunk, token i reads from the state S before the chunk and from the corrections u_j of earlier tokens j:
    #
    #     u_i = strength_i (v_i - enter_i k_i S - sum over j < i of decay_ij (k_i . k_j) u_j)
    #     y_i = enter_i q_i S + sum over j <= i of decay_ij (q_i . k_j) u_j
    #
    # decay_ij is the product of the decays after j up to i, enter_i the product from the chunk's start to i. The first
    # line is a triangular system for the u of a chunk: (1 + A) u = strength (v - enter k S). Its inverse is computed
    # for all chunks at once; only the products with S go from chunk to chunk.
    B, T, K, Dk = k.shape
    G, Dv = v.shape[-2:]
    q, k, v, log_decay, strength = (_in_chunks(x) for x in (q[:, :, :, None], k[:, :, :, None], v, log_decay, strength))
    index = torch.arange(CHUNK, device=k.device)
    earlier = index[:, None] > index  # (64, 64)
    allowed = index[:, None] >= index
    enter = log_decay.cumsum(dim=-1).exp()  # (B, K, G, N, 64)
    if numbers is not None:
        # Another document hides what is before it: the state, and earlier tokens of the chunk.
        numbers = _in_chunks(numbers[:, :, None, None], padding=-1)  # (B, 1, 1, N, 64)
        before = F.pad(numbers[:, :, :, :-1, -1:], (0, 0, 1, 0), value=-1)  # the document before each chunk
        allowed = allowed & (numbers[..., :, None] == numbers[..., None, :])
        enter = enter * (numbers == before)
    # The sums over the tokens from j + 1 to i. As differences of sums from the chunk's start they would lose digits.
    between = (log_decay[..., :, None] * earlier).cumsum(dim=-2)
    decay = between.masked_fill(~allowed, -torch.inf).exp()  # (B, K, G, N, 64, 64)
    A = (k @ k.mT) * decay * strength[..., None] * earlier
    inverse = UnitLowerInverse.apply(A)
    values = inverse @ (v * strength[..., None])
    keys = inverse @ (k * (-strength * enter)[..., None])
    writes = (k * decay[..., -1, :, None]).mT  # (B, K, G, N, Dk, 64): what is left at the end of the chunk
    kept = enter[..., -1:, None]  # (B, K, G, N, 1, 1)
    # From chunk to chunk, in as few operators as possible: a row of 2,048 tokens has 32 chunks.
    S = k.new_zeros(B * K * G, Dk, Dv) if state is None else state.flatten(0, 2)
    states = []
    corrections = []
    chunks = (x.flatten(0, 2).unbind(1) for x in (values, keys, writes, kept))
    for value, key, write, keep in zip(*chunks, strict=True):
        states.append(S)
        corrections.append(torch.baddbmm(value, key, S))  # u
        S = torch.baddbmm(S * keep, write, corrections[-1])
    y = (q * enter[..., None]) @ torch.stack(states, dim=1).view(B, K, G, -1, Dk, Dv)
    y = y + ((q @ k.mT) * decay) @ torch.stack(corrections, dim=1).view(values.shape)  # (B, K, G, N, 64, Dv)
    return y.flatten(3, 4)[:, :, :, :T].permute(0, 3, 1, 2, 4), S.view(B, K, G, Dk, Dv)


def _in_chunks(x: Tensor, padding: float = 0.0) -> Tensor:
    """(B, T, K, G, ...) -> (B, K, G, N, 64, ...). The padding at the end neither decays the state nor writes to it."""
    missing = -x.size(1) % CHUNK
    if missing:
        x = F.pad(x, (*[0] * (2 * (x.ndim - 2)), 0, missing), value=padding)
    order = (0, 2, 3, 1, *range(4, x.ndim))
    return x.permute(order).unflatten(3, (-1, CHUNK))


def step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor, state: Tensor) -> Tensor:
    """One token for each row: q, k (B, K, Dk), v (B, K, G, Dv), decay and strength (B, K, G) -> y (B, K, G, Dv).

    The state (B, K, G, Dk, Dv) is changed in place, without gradients: its memory is most of what a token reads.
    """
    B, K, G, Dk, Dv = state.shape
    q, k = (x[:, :, None].expand(-1, -1, G, -1).reshape(B * K * G, 1, Dk) for x in (q, k))
    S = state.view(B * K * G, Dk, Dv)
    S.mul_(decay.reshape(-1, 1, 1))
    correction = torch.baddbmm(v.reshape(-1, 1, Dv), k, S, alpha=-1) * strength.reshape(-1, 1, 1)
    S.baddbmm_(k.mT, correction)
    return torch.bmm(q, S).view(B, K, G, Dv)


class UnitLowerInverse(torch.autograd.Function):
    """A (..., n, n), strictly lower triangular, n a power of two -> the inverse of 1 + A."""

    # Blocks on the diagonal are inverted first, of 1 x 1, then 2 x 2 and so on. Two neighbours P and R with B below P
    # make a block twice as large, whose inverse has -R^-1 B P^-1 in the place of B. The powers of A would take as many
    # products, but they grow and cancel where the keys of a chunk are alike: 64 times the same token fails in fp32.

    @staticmethod
    def forward(ctx, A: Tensor) -> Tensor:
        n = A.size(-1)
        inverse = A.new_ones(*A.shape[:-1], 1, 1)  # (..., blocks, size, size)
        size = 1
        while size < n:
            pairs = n // (2 * size)
            blocks = A.unflatten(-1, (pairs, 2, size)).unflatten(-4, (pairs, 2, size))
            below = blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # (..., pairs, size, size)
            above, after = inverse.unflatten(-3, (pairs, 2)).unbind(-3)
            corner = after @ below @ above
            inverse = torch.cat((F.pad(above, (0, size)), torch.cat((-corner, after), dim=-1)), dim=-2)
            size *= 2
        inverse = inverse.squeeze(-3)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grads[0] @ inverse.mT)
