"""The one list of problems that every suite draws from: the reference, the kernels, and what is compiled.

``CASES`` are run on every backend that can hold them; ``LARGE`` only on a GPU. ``required_plans`` says,
without a GPU, which kernels the device tests launch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from problem_case import Case

if TYPE_CHECKING:
    from attn4.plan.plan import Plan

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (70, 20)},
    "left window": {"window": (100, 0)},
    "right window": {"window": (None, 37)},
    "off diagonal": {"window": (90, -40)},
}

HEAD_DIMS = tuple(range(8, 257, 8))


def _head_dims() -> Iterable[Case]:
    for dim, mask in itertools.product(HEAD_DIMS, ("full", "causal")):
        fault = "E1" if dim <= 16 else "E4" if dim % 16 else ""
        yield Case(
            name=f"dim {dim} {mask}", head_dim=dim, seqlen_q=150, seqlen_k=333, fault=fault, **MASKS[mask]
        )
    for mask in MASKS:
        yield Case(
            name=f"dim 192,128 {mask}",
            head_dim=192,
            head_dim_v=128,
            seqlen_q=200,
            seqlen_k=461,
            kv_heads=1,
            **MASKS[mask],
        )


def _masks() -> Iterable[Case]:
    for (name, mask), dim in itertools.product(MASKS.items(), (64, 128, 256)):
        for seqlen_q, seqlen_k in ((261, 261), (40, 300), (300, 40)):
            yield Case(
                name=f"{name} {dim} {seqlen_q}x{seqlen_k}",
                head_dim=dim,
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_k,
                **mask,
            )
    for mask, dim in itertools.product(("full", "causal", "window"), (64, 128)):
        yield Case(
            name=f"float16 {dim} {mask}",
            dtype="float16",
            head_dim=dim,
            seqlen_q=300,
            seqlen_k=411,
            **MASKS[mask],
        )
        yield Case(
            name=f"no lse {dim} {mask}",
            lse=False,
            head_dim=dim,
            seqlen_q=300,
            seqlen_k=411,
            **MASKS[mask],
        )


TILES_M = (128, 192)
TILES_N = (64, 80, 128, 176)
"""Tile sizes of the plans; one row more, and 64 more, have both been wrong elsewhere."""


def _sizes() -> Iterable[Case]:
    sizes_q = (1, 2, 64, *(m + d for m in TILES_M for d in (-1, 0, 1, 64)))
    sizes_k = (1, 7, *(k * n + d for n in TILES_N for k, d in ((1, 0), (1, 1), (2, 1), (2, 64))))
    pairs = itertools.zip_longest(sizes_q, sizes_k, fillvalue=193)
    for (seqlen_q, seqlen_k), (mask, dim) in itertools.product(
        pairs, itertools.product(("full", "causal"), (64, 128, 256))
    ):
        yield Case(
            name=f"size {seqlen_q}x{seqlen_k} {mask} {dim}",
            head_dim=dim,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            batch=1,
            **MASKS[mask],
        )
    for seqlen_q, mask in itertools.product((255, 256, 257, 320), ("full", "causal")):
        # Around the two query tiles of a CTA on Blackwell.
        yield Case(
            name=f"size {seqlen_q}x{seqlen_q + 64} {mask} 128",
            head_dim=128,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_q + 64,
            batch=1,
            **MASKS[mask],
        )


def _heads() -> Iterable[Case]:
    for heads, kv_heads in ((3, 1), (4, 1), (6, 2), (8, 2), (8, 1), (10, 2), (14, 2), (71, 1), (16, 16)):
        for mask, seqlen_q in (("full", 1), ("causal", 5), ("causal", 200)):
            yield Case(
                name=f"heads {heads}:{kv_heads} {mask} {seqlen_q}",
                heads=heads,
                kv_heads=kv_heads,
                head_dim=128,
                seqlen_q=seqlen_q,
                seqlen_k=300,
                fault="E7 E8",
                **MASKS[mask],
            )
    yield Case(
        name="heads 96:8 decode", heads=96, kv_heads=8, head_dim=128, seqlen_q=1, seqlen_k=700, fault="E7"
    )
    for dim in (136, 160, 176):
        yield Case(
            name=f"grouped {dim}", heads=6, kv_heads=2, head_dim=dim, seqlen_q=201, seqlen_k=333, fault="E3"
        )
    dims = ((64, None, "full"), (96, None, "window"), (192, 128, "causal"), (256, None, "causal"))
    for (head_dim, head_dim_v, mask), seqlen_q in itertools.product(dims, (1, 17)):
        # One position, or a few, of a group's heads share a tile.
        yield Case(
            name=f"few queries {head_dim} {mask} {seqlen_q}",
            heads=4,
            kv_heads=2,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            seqlen_q=seqlen_q,
            seqlen_k=389,
            **MASKS[mask],
        )


HARD = (
    *("negative", "very negative", "uniform", "huge", "outliers", "spike"),
    *("ascending", "descending"),
)
"""Values of ``case_inputs`` for which a running maximum, a mask or a rescale is easily wrong."""


def _values() -> Iterable[Case]:
    for values, mask in itertools.product(HARD, ("full", "causal")):
        for tiles, seqlen_q in (("", 200), (", one tile", 70)):
            yield Case(
                name=f"{values} {mask}{tiles}",
                values=values,
                head_dim=128,
                seqlen_q=seqlen_q,
                seqlen_k=449,
                **MASKS[mask],
            )
    for dtype in ("bfloat16", "float16"):
        yield Case(
            name=f"masked first tile, negative, {dtype}",
            values="negative",
            dtype=dtype,
            batch=1,
            seqlen_q=88,
            seqlen_k=448,
            heads=14,
            kv_heads=2,
            causal=True,
            fault="B1",
        )
    yield Case(name="raw logits of -2.4e5", values="huge", head_dim=128, causal=True, fault="B2")
    yield Case(
        name="one huge key",
        values="constant",
        batch=1,
        seqlen_q=1,
        seqlen_k=1,
        heads=1,
        kv_heads=1,
        fault="B7",
    )
    yield Case(
        name="uniform, no whole tile",
        values="uniform",
        seqlen_q=3,
        seqlen_k=513,
        heads=8,
        kv_heads=8,
        head_dim=128,
        fault="A11",
    )
    yield Case(name="scale 1", scale=1.0, seqlen_q=130, seqlen_k=260)


def _layouts() -> Iterable[Case]:
    shared = ("bhsd", "sbhd", "offset", "odd_rows", "fused", "heads_expanded", "batch_expanded")
    faults = {"bhsd": "D1", "sbhd": "D3", "heads_expanded": "D5", "offset": "D7", "odd_rows": "D7"}
    for layout, (mask, dim) in itertools.product(shared, (("full", 64), ("causal", 128), ("causal", 256))):
        yield Case(
            name=f"layout {layout} {dim} {mask}",
            layout=layout,
            seqlen_q=190,
            seqlen_k=190,
            heads=4,
            kv_heads=2,
            head_dim=dim,
            fault=faults.get(layout, ""),
            **MASKS[mask],
        )
    yield Case(
        name="layout offset 1x65x4x64",
        layout="offset",
        batch=1,
        seqlen_q=65,
        seqlen_k=65,
        heads=4,
        fault="D7",
    )
    yield Case(
        name="layout sbhd 16:2",
        layout="sbhd",
        heads=16,
        kv_heads=2,
        head_dim=256,
        causal=True,
        values="negative",
        fault="D3",
    )


SKEWED = (700, 3, 0, 64, 129, 1, 17)


def _packed() -> Iterable[Case]:
    for (name, mask), dim in itertools.product(MASKS.items(), (64, 128, 256)):
        if name in ("full", "causal", "window"):
            yield Case(name=f"packed self {dim} {name}", lens_q=SKEWED, lens_k=SKEWED, head_dim=dim, **mask)
            yield Case(
                name=f"packed cross {dim} {name}",
                lens_q=(5, 130, 0, 300, 64, 1),
                lens_k=(200, 0, 77, 129, 500, 64),
                heads=4,
                kv_heads=1,
                head_dim=dim,
                tail=9,
                **mask,
            )
    for layout in ("bhsd", "offset", "odd_rows", "fused"):
        yield Case(
            name=f"packed {layout}", layout=layout, lens_q=SKEWED, lens_k=SKEWED, head_dim=128, causal=True
        )
    yield Case(name="packed, no lse", lens_q=SKEWED, lens_k=SKEWED, head_dim=128, causal=True, lse=False)
    yield Case(
        name="packed float16", dtype="float16", lens_q=SKEWED, lens_k=SKEWED, head_dim=128, causal=True
    )
    yield Case(
        name="zero keys before long segments",
        lens_q=(0, 302, 210, 0),
        lens_k=(634, 436, 210, 768),
        heads=4,
        kv_heads=1,
        head_dim=256,
        causal=True,
        fault="C3",
    )
    yield Case(
        name="empty segments in decode",
        lens_q=(0, 1, 0, 1),
        lens_k=(0, 3, 0, 5),
        heads=9,
        kv_heads=3,
        fault="C5",
    )
    yield Case(
        name="one token after empty segments",
        lens_q=(0, 0, 0, 1),
        lens_k=(0, 0, 0, 1),
        heads=21,
        kv_heads=7,
        head_dim=120,
        fault="C5",
    )
    yield Case(
        name="rows past the last segment",
        lens_q=(144, 288, 512),
        lens_k=(144, 288, 512),
        tail=2,
        head_dim=128,
        fault="C6",
    )
    yield Case(
        name="NaN outside the segments", lens_q=(5, 16), lens_k=(5, 16), tail=3, head_dim=128, fault="C8"
    )
    yield Case(name="only empty segments", lens_q=(0, 0), lens_k=(0, 0), tail=4, fault="C13")
    yield Case(name="queries without any key", lens_q=(3, 9), lens_k=(0, 0), fault="C1")


def _used() -> Iterable[Case]:
    for (name, mask), dim in itertools.product(MASKS.items(), (64, 128)):
        if name in ("full", "causal", "window"):
            yield Case(
                name=f"used keys {dim} {name}",
                batch=4,
                seqlen_q=70,
                seqlen_k=300,
                used_k=(32, 300, 0, 129),
                head_dim=dim,
                heads=4,
                fault="C7",
                **mask,
            )
    yield Case(
        name="used queries and keys",
        batch=3,
        seqlen_q=260,
        seqlen_k=300,
        used_q=(0, 129, 260),
        used_k=(64, 200, 300),
        head_dim=128,
        causal=True,
        fault="C10",
    )
    yield Case(
        # Rows past the used ones meet blocks that need no mask for the others.
        name="used queries under no mask",
        seqlen_q=260,
        seqlen_k=300,
        used_q=(100, 257),
        head_dim=128,
        fault="C10",
    )
    yield Case(
        name="packed queries over a padded cache",
        batch=3,
        lens_q=(1, 64, 3),
        seqlen_k=400,
        used_k=(400, 77, 3),
        heads=8,
        kv_heads=2,
        head_dim=128,
        causal=True,
        fault="C7",
    )
    yield Case(
        name="packed and used",
        lens_q=(60, 200),
        lens_k=(128, 300),
        used_q=(33, 200),
        used_k=(100, 1),
        head_dim=128,
        tail=5,
    )
    yield Case(
        name="padded queries over packed keys", lens_k=(65, 200), seqlen_q=50, head_dim=128, causal=True
    )
    yield Case(
        name="decode over a cache",
        batch=4,
        seqlen_q=1,
        seqlen_k=128,
        used_k=(32, 64, 96, 48),
        heads=8,
        kv_heads=8,
        fault="C7 B8",
    )


def _empty() -> Iterable[Case]:
    for mask in ("full", "causal"):
        yield Case(name=f"no keys {mask}", seqlen_q=100, seqlen_k=0, fault="C1", **MASKS[mask])
    yield Case(name="no batch", batch=0, fault="C2")
    yield Case(name="no queries", seqlen_q=0, fault="C2")
    yield Case(name="no packed queries", lens_q=(0,), lens_k=(5,), fault="C2")
    yield Case(name="no sequences", lens_q=(), lens_k=(), tail=3, fault="C2")
    yield Case(name="causal, more queries than keys", seqlen_q=300, seqlen_k=100, causal=True, fault="A10 F7")


def _windows() -> Iterable[Case]:
    yield Case(
        name="window left -1 with causal",
        window=(-1, 0),
        causal=True,
        seqlen_q=300,
        seqlen_k=300,
        head_dim=128,
        fault="A1",
    )
    yield Case(name="window that is empty", window=(7, -8), seqlen_q=200, seqlen_k=200, fault="A2")
    yield Case(name="window of -1 and -1", window=(-1, -1), seqlen_q=200, seqlen_k=200, fault="A3")
    for right in (2**31 - 1, 299, 10**12):
        yield Case(name=f"right bound {right}", window=(20, right), seqlen_q=300, seqlen_k=90, fault="A5")
    yield Case(
        name="window over all keys",
        window=(1023, 0),
        seqlen_q=1024,
        seqlen_k=1024,
        dtype="float16",
        head_dim=128,
        fault="A6",
    )
    yield Case(name="window past the keys", window=(32, 64), seqlen_q=129, seqlen_k=40, fault="A8 A12")
    for left in (127, 128, 129):
        yield Case(name=f"window of {left + 1}", window=(left, 0), seqlen_q=400, seqlen_k=400, fault="A9")


CASES: tuple[Case, ...] = tuple(
    itertools.chain(
        _head_dims(),
        _masks(),
        _sizes(),
        _heads(),
        _values(),
        _layouts(),
        _packed(),
        _used(),
        _empty(),
        _windows(),
    )
)

LARGE: tuple[Case, ...] = (
    Case(name="long causal", batch=1, seqlen_q=8200, seqlen_k=8200, heads=4, head_dim=128, causal=True),
    Case(
        name="long bhsd 256",
        layout="bhsd",
        batch=1,
        seqlen_q=8192,
        seqlen_k=8192,
        heads=8,
        kv_heads=8,
        head_dim=256,
        causal=True,
        fault="D1",
    ),
    Case(name="80000 segments", lens_q=(16,) * 80000, lens_k=(16,) * 80000, heads=1, kv_heads=1, fault="D14"),
    Case(name="batch 65537", batch=65537, seqlen_q=3, seqlen_k=5, heads=1, kv_heads=1, fault="D14"),
    Case(
        name="71280 heads",
        batch=1,
        seqlen_q=3,
        seqlen_k=3,
        heads=71280,
        kv_heads=71280,
        head_dim=128,
        fault="D14",
    ),
    Case(
        name="4 million keys",
        batch=1,
        seqlen_q=2048,
        seqlen_k=2**22,
        heads=8,
        kv_heads=1,
        head_dim=128,
        causal=True,
        scale=1.0,
        fault="D10 D11",
    ),
    Case(
        name="more than 2**31 elements in q",
        batch=1,
        seqlen_q=65664,
        seqlen_k=129,
        heads=256,
        kv_heads=1,
        head_dim=128,
        fault="D13",
    ),
    Case(
        name="more than 2**31 elements in k",
        batch=17,
        seqlen_q=1,
        seqlen_k=2**20,
        used_k=(2**20,) * 16 + (1000,),
        heads=1,
        kv_heads=1,
        head_dim=128,
        scale=1.0,
        fault="D13",
    ),
)
"""Too large for a CPU; ``test_large.py`` compares what an oracle can afford."""

SORTED = ("packed self 128 causal", "packed cross 64 window", "used queries and keys", "80000 segments")
"""Cases that device tests also run with scheduler metadata; the last has more sequences than are sorted."""

BY_NAME: dict[str, Case] = {case.name: case for case in (*CASES, *LARGE)}


def case(name: str, **changes: Any) -> Case:
    """The listed case of that name, maybe changed where no other kernel is needed for it."""
    return replace(BY_NAME[name], **changes)


@cache
def required_plans(machine: str = "sm_90a") -> tuple[Plan, ...]:
    """The plans of all cases, each once: what a bundle for the device tests must hold. Needs no GPU."""
    from attn4.machine import machine as machine_named
    from attn4.plan.choose import choose
    from attn4.plan.sorting import sorting_plan, with_sorted_batches

    target = machine_named(machine)
    launched = (c for c in BY_NAME.values() if c.launches)
    plans = [choose(c.problem(), target) for c in launched]
    for name in SORTED:
        hints = BY_NAME[name].hints
        problem = replace(
            BY_NAME[name].problem(), seqlen_q=hints["max_seqlen_q"], seqlen_k=hints["max_seqlen_k"]
        )
        plan = choose(problem, target)
        plans += [plan, with_sorted_batches(plan), sorting_plan(plan)]
    return tuple(dict.fromkeys(plans))


ORDERED = (
    *("dim 64 full", "dim 128 causal", "packed self 128 causal", "heads 8:1 causal 200"),
    *("dim 256 causal", "window 256 261x261"),
)
"""Cases whose gradients are asked for deterministically too."""


def gradient_plans(machine: str = "sm_90a") -> tuple[Plan, ...]:
    """The plans of the backward passes of all cases that have one, each once. Needs no GPU."""
    from attn4.machine import machine as machine_named
    from attn4.plan.choose import choose, unsupported

    target = machine_named(machine)
    problems = [replace(c.problem(), direction="backward") for c in BY_NAME.values() if c.launches]
    problems += [
        replace(BY_NAME[name].problem(), direction="backward", deterministic=True) for name in ORDERED
    ]
    return tuple(dict.fromkeys(choose(p, target) for p in problems if not unsupported(p, target)))
