"""A causal transformer of two layers, small enough to train in a test, with its attention as an argument."""

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Pre-norm attention with grouped heads, and a gated MLP; ``attend`` takes (batch, rows, heads, dim)."""

    def __init__(self, width, heads, kv_heads, attend):
        super().__init__()
        self.heads, self.kv_heads, self.attend = heads, kv_heads, attend
        self.dim = width // heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        batch, rows, width = x.shape
        fused = self.qkv(self.before_attention(x)).view(batch, rows, -1, self.dim)
        q, k, v = fused.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        x = x + self.out(self.attend(q, k, v).reshape(batch, rows, width))
        gate, value = self.up(self.before_mlp(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * value)


class Transformer(nn.Module):
    """Next-token loss of a model whose weights follow from ``seed``."""

    def __init__(self, attend, *, vocabulary=29, width=64, heads=4, kv_heads=2, rows=40, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(rows, width)
            self.blocks = nn.ModuleList(Block(width, heads, kv_heads, attend) for _ in range(2))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens):
        given, wanted = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(given) + self.places.weight[: given.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), wanted.flatten())


def batch_of_tokens(*, batch=4, rows=24, vocabulary=29):
    """Sequences that count in steps of their own, so that one token alone does not tell the next."""
    step = torch.arange(1, batch + 1)[:, None]
    return (3 * step + step * torch.arange(rows + 1)) % vocabulary


def train(model, loss, steps=20, **shape):
    """The losses of ``steps`` steps of AdamW; ``loss`` is the model, or the model compiled."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    tokens = batch_of_tokens(**shape)
    for _ in range(steps):
        value = loss(tokens)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses
