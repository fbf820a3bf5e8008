"""What a legal call is. Every error says what was given, what is allowed and what to do about it."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor

from attn4.mask import Mask
from attn4.ops.call import Backend, Call, Options, batch_of
from attn4.ops.check_lengths import check_lengths, check_max_seqlen
from attn4.ops.schedule import LENGTHS, check_call
from attn4.reference import Lengths

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
GPU_DTYPES = (torch.bfloat16, torch.float16)

EMULATED = ("sm_90a", "sm_100a", "sm_103a")

MAX_ROWS = 2**30 - 1
"""Row indices plus window bounds of up to 2**30 stay within int32 on the GPU."""


def checked(q: Any, k: Any, v: Any, lengths: Lengths, options: Options) -> Call:
    """The call that the arguments mean. What length tensors hold is not read: ``check_values`` does that.

    Raises TypeError for objects of a wrong kind, ValueError for values out of range, NotImplementedError for
    what is legal but not built.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, x)
    check_options(options)
    _check_shapes(q, k, v, lengths)
    _check_kinds(q, k, v)
    backend = backend_of(options.backend, q.device)
    check_lengths(q, k, lengths)
    call = Call(
        q=q,
        k=k,
        v=v,
        lengths=lengths,
        softmax_scale=_softmax_scale(options.softmax_scale, q.shape[-1]),
        mask=Mask.of(bool(options.causal), window_of(options.window_size)),
        deterministic=bool(options.deterministic),
        return_lse=bool(options.return_lse),
        backend=backend,
        arch=emulated_arch(options.arch, backend),
        max_seqlen_q=check_max_seqlen("max_seqlen_q", options.max_seqlen_q),
        max_seqlen_k=check_max_seqlen("max_seqlen_k", options.max_seqlen_k),
        schedule=options.schedule,
    )
    if call.schedule is not None:
        names = tuple(name for name in LENGTHS if getattr(lengths, name) is not None)
        check_call(call.schedule, call.batch, call.mask, names, str(q.device))
    if backend != "reference":
        _check_kernel(call)
    return call


def check_options(options: Options) -> None:
    """The keywords that say what they want without a look at the tensors. Raises as ``checked`` does."""
    for name in ("causal", "deterministic", "return_lse"):
        value = getattr(options, name)
        if not isinstance(value, (bool, int)):
            raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    if isinstance(options.softcap, Tensor) or options.softcap:
        raise NotImplementedError(
            f"softcap={options.softcap} is not built yet; only softcap=0.0 (no cap) is supported"
        )
    _check_scale(options.softmax_scale)
    window_of(options.window_size)
    check_max_seqlen("max_seqlen_q", options.max_seqlen_q)
    check_max_seqlen("max_seqlen_k", options.max_seqlen_k)


def window_of(window: Any) -> tuple[int | None, int | None]:
    """``window_size`` as a pair of bounds, None or -1 where there is no limit."""
    legal = isinstance(window, (tuple, list)) and len(window) == 2
    if not legal or not all(bound is None or isinstance(bound, (int, torch.SymInt)) for bound in window):
        raise TypeError(
            f"window_size must be (left, right) with an int or None on each side, got {window!r}; "
            "None and -1 mean no limit"
        )
    left, right = window
    return left, right


def check_out(out: Any, like: Tensor, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """A preallocated result must be what the call would allocate (``like``), apart from the inputs."""
    check_out_kind(out, like)
    address = out.data_ptr()
    if not out.is_contiguous() or address % 16:
        raise ValueError(
            f"out must be contiguous and start at a multiple of 16 bytes, got strides {out.stride()} at "
            f"address {address:#x}; leave out=None and copy the result instead"
        )
    q, k, v = inputs
    if address and address in (q.data_ptr(), k.data_ptr(), v.data_ptr()):
        raise ValueError("out shares its memory with q, k or v, which are still read while out is written")
    check_out_unrecorded(out, *inputs)


def check_out_kind(out: Any, like: Tensor) -> None:
    """A preallocated result must have the shape, dtype and device of the result."""
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a torch.Tensor or None, got {type(out).__name__}")
    if out.shape != like.shape or out.dtype != like.dtype or out.device != like.device:
        raise ValueError(
            f"out has shape {tuple(out.shape)}, dtype {out.dtype}, device {out.device}, but this call writes "
            f"{tuple(like.shape)}, {like.dtype}, {like.device}"
        )


def check_out_unrecorded(*tensors: Tensor) -> None:
    """A preallocated result has no place in a graph of gradients."""
    if records_gradient(*tensors):
        raise ValueError("out= cannot be used while gradients are recorded; use torch.no_grad() or out=None")


def records_gradient(*tensors: Tensor) -> bool:
    """Whether autograd would record an operation on these tensors."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _check_tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}; use torch.as_tensor")
    if x.layout != torch.strided:
        raise ValueError(f"{name} has layout {x.layout}; only torch.strided tensors can be read")


def _softmax_scale(scale: float | None, head_dim: int) -> float:
    return 1 / math.sqrt(head_dim) if scale is None else float(scale)


def _check_scale(scale: Any) -> None:
    if scale is None:
        return
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"softmax_scale must be a float or None, got {type(scale).__name__}; use float(x)")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(
            f"softmax_scale={scale} must be finite and greater than 0; to flip or drop the scores, scale q"
        )


def backend_of(name: Any, device: torch.device) -> Backend:
    """The backend called ``name``, or that of the device."""
    if name is None:
        if device.type == "meta":
            return "reference"
        if device.type not in ("cuda", "cpu"):
            raise NotImplementedError(
                f"attn4 runs on CUDA GPUs and on the CPU, but q is on {device}; "
                "backend='reference' works on every device of torch"
            )
        return "gpu" if device.type == "cuda" else "reference"
    if name == "reference":
        return "reference"
    if name == "gpu":
        if device.type != "cuda":
            raise ValueError(f"backend='gpu' needs CUDA tensors, but q is on {device}; use q.cuda()")
        return "gpu"
    if name == "emulator":
        if device.type != "cpu":
            raise ValueError(f"backend='emulator' runs on CPU tensors, but q is on {device}; use q.cpu()")
        return "emulator"
    raise ValueError(
        f"backend={name!r} is unknown; use 'gpu', 'reference', 'emulator' or None for the tensors' device"
    )


def emulated_arch(name: Any, backend: Backend) -> str | None:
    """What the emulator runs; None on the other backends."""
    if backend != "emulator":
        if name is not None:
            raise ValueError(f"arch={name!r} is for backend='emulator'; leave it out, or choose that backend")
        return None
    if not isinstance(name, str) or name not in EMULATED:
        raise ValueError(f"arch={name!r} is not emulated; {', '.join(EMULATED)} are")
    return name


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths) -> None:
    _check_rank("q", q, lengths.cu_seqlens_q, "cu_seqlens_q")
    _check_rank("k", k, lengths.cu_seqlens_k, "cu_seqlens_k")
    if k.dim() != v.dim() or k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"k has shape {tuple(k.shape)} and v has shape {tuple(v.shape)}: they must agree in batch, "
            "length and heads (all but the last axis)"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q has head dim {q.shape[-1]} and k has {k.shape[-1]}; they must be equal")
    if 0 in (q.shape[-1], v.shape[-1]):
        raise ValueError(f"head dims must be at least 1, got {q.shape[-1]} (q, k) and {v.shape[-1]} (v)")
    _check_heads(q.shape[-2], k.shape[-2])
    batch_q, batch_k = batch_of(q, lengths.cu_seqlens_q), batch_of(k, lengths.cu_seqlens_k)
    if batch_q != batch_k:
        raise ValueError(f"q holds {batch_q} sequences and k holds {batch_k}; they must be equally many")
    for rows in (q.shape[-3], k.shape[-3]):
        # In a graph a length is a symbol, of which nothing may be asked; the kernel's call asks again.
        if isinstance(rows, int) and rows > MAX_ROWS:
            raise ValueError(f"a sequence axis of {rows} rows exceeds {MAX_ROWS}; split the batch")


def _check_rank(name: str, x: Tensor, cu_seqlens: Any, cu_name: str) -> None:
    if cu_seqlens is None and x.dim() != 4:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, but (batch, seqlen, heads, head_dim) is expected; for "
            f"packed (total, heads, head_dim) tensors use flash_attn_varlen_func with {cu_name}"
        )
    if cu_seqlens is not None and x.dim() != 3:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, but with {cu_name} (total, heads, head_dim) is expected; "
            "flatten batch and length into one axis"
        )
    if cu_seqlens is not None and not (isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1):
        given = tuple(cu_seqlens.shape) if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise ValueError(f"{cu_name} must be an int32 tensor of shape (batch + 1,), got {given}")
    if cu_seqlens is not None and cu_seqlens.shape[0] == 0:
        raise ValueError(f"{cu_name} is empty; it has batch + 1 entries and begins with 0")


def _check_heads(heads: int, kv_heads: int) -> None:
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"q has {heads} heads and k, v have {kv_heads}; q must have a positive multiple "
            "of the heads of k and v; repeat or drop heads"
        )


def _check_kinds(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dtype not in DTYPES:
        raise ValueError(f"q has dtype {q.dtype}; supported are {_names(DTYPES)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; they must be equal")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v are on {q.device}, {k.device}, {v.device}; move them to one device")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel():
            raise ValueError(
                f"{name} has strides {x.stride()}; the last one must be 1: use {name}.contiguous()"
            )


def _check_kernel(call: Call) -> None:
    if call.q.dtype not in GPU_DTYPES:
        raise NotImplementedError(
            f"q has dtype {call.q.dtype}; kernels run {_names(GPU_DTYPES)}: use q.bfloat16(), "
            "or backend='reference'"
        )


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def refuse(features: dict[str, Any], neutral: dict[str, tuple[Any, ...]], function: str) -> None:
    """Raise for a keyword that asks for a feature which is not built, or that nobody knows.

    ``neutral`` maps each known keyword to the values that ask for nothing.
    """
    for name, value in features.items():
        if name not in neutral:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if isinstance(value, Tensor) or value not in neutral[name]:
            _refuse(name, neutral[name])


def _refuse(name: str, neutral: tuple[Any, ...]) -> NoReturn:
    allowed = " or ".join(repr(value) for value in neutral)
    raise NotImplementedError(f"{name} is not built yet; leave it out or pass {allowed}")
