"""Recorded programs: tensor maps as the driver encodes them, and bulk copies of tensors through them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from recorded.arithmetic import halves, pairs32, singles, unary32
from recorded.program import HEADER, Program, hashed

DTYPES = {
    name: n
    for n, name in enumerate(
        ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32.ftz", "tf32", "tf32.ftz")
    )
}
"""CUtensorMapDataType."""
BYTES = {"u8": 1, "u16": 2, "f16": 2, "bf16": 2, "u64": 8, "s64": 8, "f64": 8}


@dataclass(frozen=True)
class Map:
    """Arguments of cuTensorMapEncodeTiled, innermost dimension first; strides in bytes without the first."""

    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...] = ()
    interleave: int = 0
    swizzle: int = 0
    promotion: int = 0
    nan_fill: int = 0

    @property
    def element_strides(self) -> tuple[int, ...]:
        return self.steps or (1,) * len(self.dims)

    @property
    def element_bytes(self) -> int:
        return BYTES.get(self.dtype, 4)


@dataclass(frozen=True)
class Copy(Program):
    """A program whose second input is the 128 bytes of a tensor map of its first.

    ``in_place``: its output is the first input, read back.
    """

    map: Map | None = None
    in_place: bool = False


def packed(dtype: str, dims: tuple[int, ...], box: tuple[int, ...], **more) -> Map:
    """A map of a tensor without gaps but for rows of a multiple of 16 bytes."""
    stride, strides = BYTES.get(dtype, 4), []
    for n in dims[:-1]:
        stride = -(-stride * n // 16) * 16
        strides.append(stride)
    return Map(dtype, dims, tuple(strides), box, **more)


def encodings() -> dict[str, Map]:
    """Maps of which only the encoding is recorded."""
    flat = packed("bf16", (64, 48), (64, 8), swizzle=3)
    maps = {
        f"dtype {name}": packed(name, (256, 5), (32 if BYTES.get(name, 4) < 8 else 16, 3)) for name in DTYPES
    }
    maps |= {f"rank {n}": packed("f32", (20, 7, 6, 5, 4)[:n], (4, 3, 2, 2, 1)[:n]) for n in range(1, 6)}
    maps |= {
        f"swizzle {n}": replace(flat, swizzle=n, box=(64 if n in (0, 3) else 16 * n, 8)) for n in (0, 1, 2, 3)
    }
    maps |= {f"swizzle {n} of u8": packed("u8", (256, 9), (16, 8), swizzle=n) for n in (4, 5, 6)}
    maps |= {f"promotion {n}": replace(flat, promotion=n) for n in range(4)}
    maps |= {
        f"interleave {n}": packed("bf16", (8 * n, 40, 9, 7), (8 * n, 5, 3, 2), interleave=n, swizzle=n == 2)
        for n in (1, 2)
    }
    maps["nan fill"] = replace(flat, nan_fill=1)
    maps["steps"] = packed("f32", (64, 32, 8), (16, 8, 4), steps=(1, 2, 3))
    maps["inner step"] = packed("f32", (64, 32), (16, 8), steps=(2, 1))
    maps["wide strides"] = Map("bf16", (64, 1000, 70000), (1 << 20, 1 << 37), (64, 3, 2), swizzle=3)
    maps["stride of 0"] = Map("bf16", (64, 10, 6), (0, 256), (64, 3, 2), swizzle=3)
    maps["long"] = Map("u8", (1 << 32, 1 << 20), (1 << 32,), (128, 256))
    maps["odd box"] = packed("bf16", (100, 37, 11), (24, 31, 7))
    maps["largest box"] = packed("u8", (256, 256), (256, 256))
    return maps


def _kernel(map_: Map, room: int, copies: str, *, load: bool) -> str:
    """Parameters: tensor, map, words for shared memory; the output is shared memory after, or the tensor."""
    wait = """
mbarrier.arrive.expect_tx.shared.b64 %v, [%bar], %bytes;
waiting:
mbarrier.test_wait.parity.acquire.cta.shared.b64 %p, [%bar], 0;
add.u32 %n, %n, 1;  setp.lt.and.u32 %q, %n, 1000000, !%p;
@%q bra waiting;
"""
    done = """
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
"""
    source, words = ("%m", room // 4) if load else ("", 0)
    out = (
        f"""bar.sync 0;
mov.u32 %n, %t;
results:
mad.lo.u32 %s, %n, 4, %m;  ld.shared.b32 %x, [%s];
mad.wide.u32 %v, %n, 4, %o;  st.global.b32 [%v], %x;
add.u32 %n, %n, 32;  setp.lt.u32 %p, %n, {words};
@%p bra results;"""
        if source
        else ""
    )
    return f"""{HEADER}.visible .entry k(.param .u64 p0, .param .u64 p1, .param .u64 p2, .param .u64 p3)
{{
.shared .align 1024 .b8 memory[{room}];  .shared .align 8 .b8 barrier[8];
.reg .b32 %t, %m, %bar, %n, %s, %x, %bytes;  .reg .b64 %v, %o, %map;  .reg .pred %p, %q;
mov.u32 %t, %tid.x;  mov.u32 %m, memory;  mov.u32 %bar, barrier;
ld.param.u64 %map, [p1];  ld.param.u64 %o, [p3];  mov.u32 %bytes, 0;
ld.param.u64 %v, [p2];  mad.wide.u32 %v, %t, 4, %v;
mov.u32 %n, %t;
fill:
ld.global.b32 %x, [%v];  mad.lo.u32 %s, %n, 4, %m;  st.shared.b32 [%s], %x;
add.u64 %v, %v, 128;  add.u32 %n, %n, 32;  setp.lt.u32 %p, %n, {room // 4};
@%p bra fill;
fence.proxy.async;
setp.eq.u32 %p, %t, 0;
@%p mbarrier.init.shared.b64 [%bar], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
setp.ne.u32 %p, %t, 0;
@%p bra finished;
mov.u32 %n, 0;
{copies}
{wait if load else done}
finished:
{out}
ret;
}}
"""


def _load(name: str, map_: Map, boxes: list[tuple[int, ...]], tensor) -> Copy:
    rank = len(map_.dims)
    size = map_.element_bytes * int(
        np.prod(
            [map_.box[0], *(-(-b // s) for b, s in zip(map_.box[1:], map_.element_strides[1:], strict=True))]
        )
    )
    slot = -(-size // 1024) * 1024
    room = slot * len(boxes)
    lines = [
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes [%s], "
        f"[%map, {{{', '.join(map(str, at))}}}], [%bar];\n"
        f"add.u32 %s, %s, {slot};  add.u32 %bytes, %bytes, {size};"
        for at in boxes
    ]
    body = "mov.u32 %s, %m;\n" + "\n".join(lines)
    inputs = (tensor, np.zeros(32, np.uint32), np.full(room // 4, 0xCBCBCBCB, np.uint32))
    return Copy(name, _kernel(map_, room, body, load=True), inputs, "u4", (1, room // 4), (1, 32), map=map_)


def _store(name: str, map_: Map, boxes: list[tuple[int, ...]], operation: str, tensor, values) -> Copy:
    """The output is the tensor: it is the first input, read back."""
    rank = len(map_.dims)
    size = map_.element_bytes * int(np.prod(map_.box))
    slot = -(-size // 1024) * 1024
    room = slot * len(boxes)
    verb = f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{operation}.tile" if operation else (
        f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile")  # fmt: skip
    lines = [
        f"{verb}.bulk_group [%map, {{{', '.join(map(str, at))}}}], [%s];  add.u32 %s, %s, {slot};"
        for at in boxes
    ]
    body = "mov.u32 %s, %m;\n" + "\n".join(lines)
    filler = np.resize(values, room // 4).astype(np.uint32)
    inputs = (tensor, np.zeros(32, np.uint32), filler)
    return Copy(
        name,
        _kernel(map_, room, body, load=False),
        inputs,
        "u4",
        (1, len(tensor)),
        (1, 32),
        map=map_,
        in_place=True,
    )


def _words(map_: Map, seed: int):
    count = (map_.strides[-1] if map_.strides else map_.element_bytes) * map_.dims[-1]
    return hashed(-(-count // 512) * 128, seed).astype(np.uint32)


def loads() -> list[Program]:
    out = []
    for swizzle, span in ((0, 64), (1, 32), (2, 64), (3, 128)):
        map_ = packed("bf16", (span // 2 + 8, 21), (span // 2, 16), swizzle=swizzle)
        out.append(_load(f"load swizzle {swizzle}", map_, [(0, 0), (8, -3), (-8, 17)], _words(map_, swizzle)))
    for rank in (1, 3, 4, 5):
        # The first coordinate is a multiple of 16 bytes: others are tried alone.
        map_ = packed("u16", (20, 5, 4, 3, 3)[:rank], (8, 3, 2, 2, 2)[:rank])
        boxes = [(0,) * rank, (-8,) + (1,) * (rank - 1), (16,) + (2,) * (rank - 1)]
        out.append(_load(f"load rank {rank}", map_, boxes, _words(map_, rank)))
    for name, first in (("odd", 1), ("of 4 bytes", 2), ("of 8 bytes", 4), ("negative", -2)):
        map_ = packed("u16", (20, 5), (8, 3))
        out.append(_load(f"load from a column {name}", map_, [(first, 1)], _words(map_, 12)))
    map_ = packed("f32", (24, 19), (8, 9), steps=(1, 2))
    out.append(_load("load steps", map_, [(0, 0), (4, 3), (20, 12)], _words(map_, 7)))
    map_ = packed("f32", (24, 8), (16, 4), steps=(2, 1))
    out.append(_load("load inner step", map_, [(0, 0), (4, 3)], _words(map_, 8)))
    for name, fill in (("bf16", 1), ("f32", 1), ("f16", 1)):
        map_ = packed(name, (24, 8), (16, 4), nan_fill=fill)
        out.append(_load(f"load {name} with NaN fill", map_, [(16, 6)], _words(map_, 9)))
    for name in ("f32.ftz", "tf32", "tf32.ftz", "f32"):
        map_ = packed(name, (32, 8), (32, 8))
        out.append(_load(f"load {name}", map_, [(0, 0)], singles(256, 10)))
        out.append(_load(f"load special {name}", map_, [(0, 0)], unary32(256, 13)))
    map_ = packed("bf16", (64, 21), (64, 8), swizzle=3, promotion=2)
    out.append(_load("load promoted", map_, [(0, 3)], _words(map_, 11)))
    return out


def stores() -> list[Program]:
    out = []
    for swizzle, span in ((0, 64), (1, 32), (2, 64), (3, 128)):
        map_ = packed("bf16", (span // 2 + 8, 11), (span // 2, 8), swizzle=swizzle)
        out.append(
            _store(f"store swizzle {swizzle}", map_, [(0, 0), (16, 7)], "", _words(map_, 20), hashed(512, 21))
        )
    map_ = packed("u16", (20, 5, 4), (8, 3, 2))
    boxes = [(-8, -1, -1), (16, 3, 3), (8, 1, 1)]
    out.append(_store("store rank 3", map_, boxes, "", _words(map_, 22), hashed(512, 23)))
    map_ = packed("u16", (20, 5), (8, 3))
    out.append(_store("store to a column of 4 bytes", map_, [(2, 1)], "", _words(map_, 24), hashed(512, 25)))
    ordered = ("add", "min", "max")
    operations = dict.fromkeys(("s32", "u64", "f16", "bf16"), ordered) | {"s64": ("min", "max")}
    operations |= {"u32": (*ordered, "inc", "dec", "and", "or", "xor"), "f32": ("add",), "f32.ftz": ("add",)}
    for dtype, names in operations.items():
        map_ = (
            packed(dtype, (32, 8), (32, 8)) if BYTES.get(dtype, 4) == 4 else packed(dtype, (16, 8), (16, 8))
        )
        for operation in names:
            first, second = pairs32(256, 30)
            if dtype in ("f16", "bf16"):
                first, second = halves(256, 31), halves(256, 32)
            count = map_.strides[0] * 8 // 4
            tensor = np.concatenate([first[:count], np.zeros(-count % 128, np.uint32)])
            out.append(_store(f"reduce {operation} {dtype}", map_, [(0, 0)], operation, tensor, second))
    return out


def programs() -> list[Program]:
    """All programs of this file."""
    return [*loads(), *stores()]
