"""Loss curves of a small transformer on the reference path and on the virtual B200: rows, and a plot of them.

``python -m emulated.training_curves docs/results`` (with src and tests on the path) trains and writes
``training-b200-emulated.jsonl`` and ``.png``; about a minute of CPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from attn4 import flash_attn_func
from small_transformer import Transformer, train

SHAPE = {"width": 64, "heads": 2, "kv_heads": 1}
BATCH = 2
NAME = "training-b200-emulated"

CURVES: dict[str, tuple[torch.dtype | None, dict[str, Any]]] = {
    "reference, float32": (None, {}),
    "reference, bfloat16": (torch.bfloat16, {}),
    "virtual B200, bfloat16": (torch.bfloat16, {"backend": "emulator", "arch": "sm_100a"}),
}
"""The dtype of autocast, and where attention runs; all else is torch on the CPU."""


def curve(name: str, steps: int = 20) -> list[float]:
    """The losses of one of ``CURVES``, from the same weights."""
    dtype, where = CURVES[name]
    model = Transformer(lambda q, k, v: flash_attn_func(q, k, v, causal=True, **where), **SHAPE)
    return train(model, _under_autocast(model, dtype), steps=steps, batch=BATCH)


def _under_autocast(model: torch.nn.Module, dtype: torch.dtype | None) -> Callable[[torch.Tensor], Any]:
    def loss(tokens: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            return model(tokens)

    return loss


def rows() -> list[dict[str, Any]]:
    """One row a curve."""
    versions = {"torch": torch.__version__}
    shape = {**SHAPE, "batch": BATCH, "layers": 2}
    return [
        {"curve": name, "losses": curve(name), "model": shape, "versions": versions, "kind": "emulated"}
        for name in CURVES
    ]


def draw(found: Sequence[dict[str, Any]], file: Path) -> None:
    """Losses over steps, and below how far each curve is from the first."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    styles = ("-", "--", ":")
    for index, (row, style) in enumerate(zip(found, styles, strict=True)):
        look = {"label": row["curve"], "linewidth": 2, "color": f"C{index}"}
        above.plot(row["losses"], style, **look)
        if row is not found[0]:
            distance = [abs(x - y) for x, y in zip(row["losses"], found[0]["losses"], strict=True)]
            below.plot(distance, style, **look)
    above.set_ylabel("loss")
    above.legend()
    below.set_yscale("log")
    below.set_ylabel(f"distance from {found[0]['curve']}")
    below.set_xlabel("step")
    below.set_xticks(range(0, len(found[0]["losses"]), 2))
    above.set_title("Two layers, causal; attention of the B200 emulated")
    figure.savefig(file, dpi=150)


def main(folder: Path) -> None:
    found = rows()
    (folder / f"{NAME}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    draw(found, folder / f"{NAME}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
