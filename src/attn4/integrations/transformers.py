"""attn4 as an attention implementation of Hugging Face transformers.

    from attn4.integrations.transformers import register
    register()
    model = AutoModel.from_pretrained(..., attn_implementation="attn4")

Padded batches are packed before attention and padded again after it. Full, causal and sliding-window masks
are known, padding on either side, packed sequences and caches; else ``NotImplementedError``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn4.api import flash_attn_func, flash_attn_varlen_func

WAY_OUT = "load the model with attn_implementation='sdpa' or 'eager' for it"

REFUSED = ("dropout", "softcap", "s_aux", "position_bias", "head_mask", "output_attentions", "block_table")
"""Keywords of transformers' attention functions that change the result and that attn4 lacks."""

KNOWN_MASKS = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "packed_sequence_mask_function",
}
"""Functions of ``transformers.masking_utils`` whose masks attn4 computes itself, from lengths and bounds."""


class Segments(Tensor):
    """int (batch, seqlen): which of the sequences packed in a row each token belongs to.

    A type of its own, because a plain 2-D mask already has a meaning: where there is padding.
    """


def register(name: str = "attn4") -> None:
    """Make ``attn_implementation=name`` known to transformers, with the mask function that belongs to it.

    A name with "flash" in it is a ``ValueError``: transformers takes it for a package of its own to load.
    """
    if "flash" in name:
        raise ValueError(f"the name {name!r} contains 'flash', which transformers reserves; choose another")
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls.

    ``query`` is (batch, heads, seqlen_q, head_dim), ``key`` and ``value`` (batch, kv_heads, seqlen_k, ...);
    the result is (batch, seqlen_q, heads, head_dim_v), and no weights. ``sliding_window`` counts the tokens
    that a query sees, itself included. ``attention_mask`` is what `mask` made.
    """
    refuse(options)
    causal = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True)) if causal is None else bool(causal)
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    settings: dict[str, Any] = {"softmax_scale": scaling, "causal": causal}
    if sliding_window is not None:
        settings["window_size"] = (sliding_window - 1, 0 if causal else sliding_window - 1)

    if attention_mask is not None and not isinstance(attention_mask, Segments):
        return padded_attention((q, k, v), attention_mask, settings), None
    cu_q, cu_k = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    if attention_mask is not None and cu_q is None:
        cu_q = cu_k = boundaries(attention_mask)
    if cu_q is None or cu_k is None:
        return flash_attn_func(q, k, v, **settings), None
    settings |= {"cu_seqlens_q": cu_q.to(torch.int32), "cu_seqlens_k": cu_k.to(torch.int32)}
    packed = flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), **settings)
    return packed.view(*q.shape[:3], packed.shape[-1]), None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """The mask function that transformers calls once a forward pass, for all layers of one kind.

    Returns None where nothing is padded, `Segments` where rows hold packed sequences, otherwise which
    keys are real, bool (batch, keys); in a causal mask the queries stand at the last of these keys.
    """
    makers = dict(parts(mask_function)) if mask_function is not None else {}
    if unknown := sorted(makers.keys() - KNOWN_MASKS):
        raise NotImplementedError(f"attn4 has no mask of the kind {', '.join(unknown)}; {WAY_OUT}")
    if "packed_sequence_mask_function" in makers:
        segments: Tensor = makers["packed_sequence_mask_function"]["packed_sequence_mask"]
        return segments.as_subclass(Segments)
    seen = kv_length
    if "causal_mask_function" in makers:
        # A cache of fixed size is longer than what has been seen; what lies past that is unwritten.
        seen = min(kv_length, int(q_offset) + q_length - kv_offset)
    if attention_mask is None:
        device = options.get("device")
        return None if seen == kv_length else torch.ones(batch_size, seen, dtype=torch.bool, device=device)
    real = attention_mask[:, -kv_length:][:, :seen].bool()
    if real.shape[1] == kv_length and bool(real.all()):
        return None
    starts = (~pad(real, (1, 0))[:, :-1] & real).sum(1)
    if any("sliding" in maker for maker in makers) and bool((starts > 1).any()):
        raise NotImplementedError(f"attn4 has no sliding window over a row with padding inside it; {WAY_OUT}")
    return real


def parts(mask_function: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The functions that made a composed mask function, by name, with what each was given.

    A mask function answers for one pair of positions; what shape it draws is told by where it came from.
    """
    from transformers import masking_utils

    for name in ("causal_mask_function", "bidirectional_mask_function"):
        # By identity: torch.compile cannot look into where a function came from.
        if mask_function is getattr(masking_utils, name, None):
            yield name, {}
            return
    maker = mask_function.__qualname__.split(".")[0]
    given = dict(inspect.getclosurevars(mask_function).nonlocals)
    if mask_function.__module__ != "transformers.masking_utils":
        yield f"{mask_function.__module__}.{mask_function.__qualname__}", given
    elif maker == "and_masks":
        for part in given["mask_functions"]:
            yield from parts(part)
    elif maker == "remap_positions_for_packed_sequence":
        yield from parts(given["mask_function"])
    else:
        yield maker, given


def refuse(options: dict[str, Any]) -> None:
    """Raise `NotImplementedError` for what would otherwise be left out of the result."""
    for name in REFUSED:
        value = options.get(name)
        if isinstance(value, Tensor) or value:
            hint = "call model.eval(), or " if name == "dropout" else ""
            raise NotImplementedError(f"attn4 has no {name}, which this model asked for; {hint}{WAY_OUT}")


def boundaries(segments: Tensor) -> Tensor:
    """int32 ``cu_seqlens`` of the flattened rows: a sequence ends where the number changes, or the row."""
    numbers = segments.as_subclass(Tensor)
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return pad(begins.flatten().nonzero().flatten(), (0, 1), value=numbers.numel()).to(torch.int32)


def pack(real: Tensor) -> tuple[Tensor, Tensor]:
    """Where the real tokens of (batch, seqlen) lie among all, and their int32 ``cu_seqlens``."""
    lengths = real.sum(1, dtype=torch.int32)
    return real.flatten().nonzero().flatten(), pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def padded_attention(qkv: tuple[Tensor, Tensor, Tensor], mask_2d: Tensor, settings: dict[str, Any]) -> Tensor:
    """Attention over the real tokens of (batch, seqlen, heads, head_dim); queries that are padding get 0."""
    q, k, v = qkv
    if mask_2d.ndim != 2 or mask_2d.shape[1] > k.shape[1]:
        raise NotImplementedError(
            f"attn4 takes a padding mask (batch, keys) for {k.shape[1]} keys, not one of shape "
            f"{tuple(mask_2d.shape)}; pass the model such a mask, or {WAY_OUT}"
        )
    real_k = mask_2d.to(k.device).bool()
    k, v = k[:, : real_k.shape[1]], v[:, : real_k.shape[1]]
    if settings["causal"] or (q.shape[1] == k.shape[1] and "window_size" in settings):
        real_q = real_k[:, -q.shape[1] :]
    elif "window_size" not in settings:
        real_q = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device)
    else:
        raise NotImplementedError(f"attn4 has no sliding window across padded sequences; {WAY_OUT}")
    (where_q, cu_q), (where_k, cu_k) = pack(real_q), pack(real_k)
    lengths: dict[str, Any] = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    k, v = k.flatten(0, 1)[where_k], v.flatten(0, 1)[where_k]
    packed: Tensor = flash_attn_varlen_func(q.flatten(0, 1)[where_q], k, v, **lengths, **settings)
    out = packed.new_zeros(q.shape[0] * q.shape[1], *packed.shape[1:])
    return out.index_copy(0, where_q, packed).view(*q.shape[:3], packed.shape[-1])
