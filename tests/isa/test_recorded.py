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
QUOTIENTS = ("div.approx", "div.full")

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
        if program.labels and program.labels[n].startswith(QUOTIENTS):
            wrong = np.flatnonzero(distance(mine, theirs, 32) > 1)
        if len(wrong):
            at = wrong[0]
            label = program.labels[n] if program.labels else f"row {n}"
            sources = ", ".join(f"{array[at]:#x}" for array in program.inputs if at < len(array))
            lines.append(
                f"{label} {len(wrong)} of {len(mine)}: [{at}] {mine[at]:#x}, {theirs[at]:#x} of {sources}"
            )
    return lines


def distance(mine, theirs, width):
    """In units of the last place; bits as numbers of sign and magnitude."""
    places = []
    for bits in (mine, theirs):
        magnitude = (bits & bits.dtype.type((1 << width - 1) - 1)).astype(np.int64)
        places.append(np.where(bits >> bits.dtype.type(width - 1), -magnitude, magnitude))
    return np.abs(places[0] - places[1])


def judged(label, program, mine, theirs):
    """How far the two are apart, in units of what is allowed; whether both are numbers."""
    if "f16x2" in label:
        mine, theirs = (np.ascontiguousarray(x).view(np.uint16) for x in (mine, theirs))
        infinity = 0x7C00 if ".f16x2" in label else 0x7F80
        finite = ((mine & 0x7FFF) < infinity) & ((theirs & 0x7FFF) < infinity)
        return distance(mine, theirs, 16), finite, mine == theirs
    if "f64" in label:
        apart = distance(mine >> np.uint64(32), theirs >> np.uint64(32), 32)
        if "ftz" not in label:
            apart = np.abs(mine.astype(np.int64) - theirs.astype(np.int64))
        return apart, np.isfinite(mine.view(np.float64)), mine == theirs
    with np.errstate(invalid="ignore"):
        x, got, expected = (
            bits.view(np.float32).astype(np.float64) for bits in (program.inputs[0], mine, theirs)
        )
    finite = np.isfinite(got) & np.isfinite(expected)
    with np.errstate(invalid="ignore"):
        error = np.abs(got - expected)
        relative = error / np.maximum(np.abs(expected), 2.0**-149)
    if label.startswith("lg2"):
        error = np.where((x > 0.5) & (x < 2), error, relative) * 2.0**22
    elif label.startswith(("sin", "cos")):
        # PTX: 2**-20.5 up to 2 pi, 2**-14.7 up to 100 pi; beyond it says nothing.
        error = error * np.where(np.abs(x) <= 2 * np.pi, 2.0**20.5, 2.0**14.7)
        error[np.abs(x) > 100 * np.pi] = 0
    elif label.startswith("tanh"):
        error = relative * 2.0**11
    else:
        error = distance(mine, theirs, 32)
    return error, finite, mine == theirs


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p.name in APPROXIMATE], ids=lambda p: p.name)
def test_approximations_are_as_near_to_the_chip_as_ptx_says(program):
    """One unit of the last place, or PTX's bound where that is wider; NaN and infinities are the same."""
    for label, mine, theirs in zip(program.labels, emulate(program), recorded(program), strict=True):
        apart, finite, same = judged(label, program, mine, theirs)
        assert apart[finite].max() <= 1, label
        assert same[~finite].all(), label


@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p.name not in APPROXIMATE], ids=lambda program: program.name
)
def test_the_emulator_gives_the_bits_of_the_chip(program):
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
