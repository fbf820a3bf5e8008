"""The emulator gives what an H200 gave, bit for bit, but for the approximate functions."""

import numpy as np
import pytest

from attn4.emulator.units.tensormap import SWIZZLES, DescriptorError, TensorMap, decode
from recorded import arithmetic, copies, exchange, products
from recorded.copies import Copy
from recorded.replay import DATA, about, emulate, recording

NAME = "h200"
PROGRAMS = [program for chapter in (arithmetic, exchange, products, copies) for program in chapter.programs()]
APPROXIMATE = ("ex2", "lg2", "reciprocals", "angles", "tanh", "special pairs", "special doubles")

pytestmark = pytest.mark.skipif(
    not (DATA / f"{NAME}.npz.xz").exists(), reason=f"nothing is recorded in {DATA.name}/{NAME}.npz.xz"
)


def recorded(program):
    if program.name in about(NAME)["failures"]:
        pytest.skip(f"not recorded: {about(NAME)['failures'][program.name].splitlines()[0]}")
    if program.name not in about(NAME)["digests"]:
        pytest.skip("not recorded yet")
    assert about(NAME)["digests"][program.name] == program.digest, "another program was recorded"
    return recording(NAME)[program.name].T


def differences(program, got, expected):
    """A line for each instruction that differs, with the first difference."""
    lines = []
    for n, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        wrong = np.flatnonzero(mine != theirs)
        if len(wrong):
            at = wrong[0]
            label = program.labels[n] if program.labels else f"row {n}"
            sources = ", ".join(f"{array[at]:#x}" for array in program.inputs if at < len(array))
            lines.append(
                f"{label} {len(wrong)} of {len(mine)}: [{at}] {mine[at]:#x}, {theirs[at]:#x} of {sources}"
            )
    return lines


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_the_emulator_gives_the_bits_of_the_chip(program):
    if program.name in APPROXIMATE:
        pytest.skip("compared within bounds")
    expected = recorded(program)
    tensor_map = recording(NAME).get(f"map of {program.name}") if isinstance(program, Copy) else None
    assert differences(program, emulate(program, tensor_map), expected) == []


MAPS = copies.encodings()


@pytest.mark.parametrize("name", MAPS)
def test_tensor_maps_of_the_driver_are_understood(name):
    if f"map: {name}" in about(NAME)["failures"]:
        pytest.skip("the driver refuses it")
    asked = MAPS[name]
    descriptor = recording(NAME)[f"map: {name}"].reshape(-1).tobytes()
    if asked.interleave:
        with pytest.raises(DescriptorError, match="interleave"):
            decode(descriptor)
        return
    kind = asked.dtype.replace("tf32", "f32")
    steps = (1, *asked.element_strides[1:])
    assert decode(descriptor) == TensorMap(
        address=about(NAME)["map address"],
        element=kind,
        shape=asked.dims,
        strides=(asked.element_bytes, *asked.strides),
        box=asked.box,
        swizzle=SWIZZLES[asked.swizzle],
        steps=steps if max(steps) > 1 else (),
        nan_fill=bool(asked.nan_fill),
        tf32="tf32" in asked.dtype,
    )
