"""Metadata made once on the device: sorted as numpy sorts, and no bit of a result changes with it."""

import numpy as np
import pytest
import torch

from attn4 import get_scheduler_metadata
from cases import SORTED, case
from poison import poisoned_memory


@pytest.mark.parametrize("name", SORTED)
def test_metadata_changes_the_order_of_work_alone(name):
    """The call without it is judged with the other cases."""
    named = case(name)
    inputs = named.inputs("cuda")
    with poisoned_memory():
        keywords = named.metadata(inputs)
        found = named.run(inputs, **keywords)
        again = named.run(inputs, **keywords)
        unsorted = named.run(inputs, **named.hints)
    for other in (again, unsorted):
        assert all(torch.equal(x, y) for x, y in zip(found, other, strict=True))


@pytest.mark.parametrize("count", [1, 33, 257, 5000, 8192, 8193])
def test_batches_are_sorted_up_to_the_limit(count):
    lengths = np.random.default_rng(count).integers(0, 3000, count)
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    # The tile of a listed case, whose kernels are in the bundle.
    asked = {"num_heads_q": 2, "num_heads_kv": 2, "headdim": 128, "causal": True}
    metadata = get_scheduler_metadata(
        max_seqlen_q=3000, max_seqlen_k=3000, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, **asked
    )
    _, keys, _ = metadata.made_for.tile
    steps = (lengths + keys - 1) // keys
    expected = np.argsort(-steps, kind="stable") if count <= 8192 else np.arange(count)
    assert metadata.batch_order.tolist() == [*expected.tolist(), count]
