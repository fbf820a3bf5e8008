"""What an import costs: `import attn4` loads nothing that is large."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "cutlass", "tvm_ffi", "transformers")


def loaded_after(code):
    """The heavy packages that a fresh interpreter has loaded after ``code``."""
    report = f"; import sys; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    "code",
    [
        "import attn4; dir(attn4); attn4.__version__",
        "import attn4; attn4.explain",
        "import attn4.problem, attn4.mask, attn4.machine, attn4.plan.choose",
        "import attn4.cli; attn4.cli.build_parser(['--version'])",
    ],
)
def test_nothing_heavy_is_loaded(code):
    assert loaded_after(code) == []


def test_a_call_on_the_cpu_needs_no_compiler():
    code = "import attn4, torch; x = torch.zeros(1, 4, 2, 8); attn4.flash_attn_func(x, x, x)"
    assert set(loaded_after(code)) <= {"torch", "numpy"}


def test_the_public_names_are_these_and_no_others():
    import attn4

    assert dir(attn4) == [
        "__version__",
        "explain",
        "flash_attn_func",
        "flash_attn_varlen_func",
        "get_scheduler_metadata",
        "reference",
    ]
    for name in dir(attn4):
        assert getattr(attn4, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'flash_attn'"):
        _ = attn4.flash_attn
