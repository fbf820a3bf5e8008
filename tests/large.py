"""What tests of large tensors share."""

import pytest
import torch

GIB = 2**30


def need_memory(gib):
    """Skip a test where less GPU memory is free."""
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free GPU memory")
