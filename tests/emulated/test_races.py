"""Races found by clocks: right kernels are clean under every schedule, and what is taken out is missed."""

import contextlib
import re
import shutil
import struct
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("tvm_ffi")


from attn4.artifact.key import toolchain
from attn4.emulator.faults import EmulationError
from attn4.emulator.grid import Residency, Shape
from attn4.emulator.machine import Machine
from attn4.emulator.ptx.parser import parse
from attn4.emulator.runner import Runner
from attn4.emulator.schedule import RoundRobin, named
from emulated import forward_kernel
from emulated.forward_kernel import Case, artifact, attend
from emulated.tiny import THREAD, kernel_text, words

compiled = pytest.mark.skipif(
    toolchain() is None or shutil.which("gcc") is None, reason="CuTe DSL and gcc are needed"
)

SCHEDULES = ("round_robin", "random", "adversarial", "eager")
CASE = Case(128, "causal", 384, 512, heads=2)


def findings(text, arrays, *, grid=1, block=128, cluster=1, schedule=None):
    """What a small kernel is found to do wrong."""
    module = parse(text)
    machine = Machine(schedule or RoundRobin(), Residency(sms=4), hazards=True, strict=True)
    for n, array in enumerate(arrays):
        machine.memory.register(array, name=f"p{n}")
    parameters = struct.pack(f"<{len(arrays)}Q", *(array.ctypes.data for array in arrays))
    shape = Shape((grid, 1, 1), (block, 1, 1), (cluster, 1, 1))
    return machine.launch(module.kernels[0], shape, parameters, module.globals).findings


def planted(monkeypatch, change, schedule="round_robin"):
    """What is found in attn4's Hopper forward after ``change`` of its text."""
    text = artifact(CASE).ptx()
    changed = change(text)
    assert changed != text

    class Changed(Runner):
        __slots__ = ()

        def __call__(self, launch):
            super().__call__(replace(launch, ptx=changed, image=str(hash(changed))))

    runners = []

    def changed_runner(*given, **options):
        runners.append(Changed(*given, **options))
        return runners[-1]

    monkeypatch.setattr(forward_kernel, "Runner", changed_runner)
    # Some go on to wait for what never comes; what was found until then is what is asked for.
    with contextlib.suppress(EmulationError):
        attend(CASE, named(schedule), hazards=True)
    return runners[-1].grids[-1].findings


WAIT = r"mbarrier\.try_wait\S*\s+(\w+),[^;]*;"


def without_waits(text, *, before_a_copy):
    """Without the waits for empty slots (those before a copy is announced), or without all others."""
    pieces = re.split(f"({WAIT})", text)
    for n in range(1, len(pieces), 3):
        following = re.search(r"mbarrier\.\w+(\.expect_tx)?", pieces[n + 2])
        announces = following is not None and following[1] is not None
        if announces == before_a_copy:
            pieces[n] = f"setp.eq.u32 {pieces[n + 1]}, 0, 0;"
        pieces[n + 1] = ""
    return "".join(pieces)


@compiled
@pytest.mark.parametrize(
    "schedule",
    ["round_robin", "adversarial", *(pytest.param(s, marks=pytest.mark.slow) for s in ("random", "eager"))],
)
def test_the_forward_kernel_is_clean(schedule):
    result = attend(CASE, named(schedule, 1), hazards=True)
    assert str(result.grid.findings) == ""
    assert result.error < 4e-3


@compiled
@pytest.mark.parametrize("schedule", ["round_robin", "eager"])
def test_a_ring_refilled_without_a_wait_is_found(monkeypatch, schedule):
    found = planted(monkeypatch, lambda text: without_waits(text, before_a_copy=True), schedule)
    assert any(h.kind == "race" and "that wgmma of warp" in h.message for h in found)
    assert all("cp.async.bulk.tensor" in h.message for h in found)


@compiled
def test_a_slot_read_without_a_wait_is_found(monkeypatch):
    found = planted(monkeypatch, lambda text: without_waits(text, before_a_copy=False), "eager")
    assert any(h.kind == "race" and "a copy that completes on the mbarrier" in h.message for h in found)


@compiled
def test_a_slot_freed_while_a_product_reads_it_is_found(monkeypatch):
    found = planted(monkeypatch, lambda text: text.replace("wgmma.wait_group.sync.aligned", "//"))
    assert any(h.kind == "race" and "no wgmma.wait_group" in h.message for h in found)


@compiled
def test_staging_exchanged_in_a_warp_without_its_barrier_is_found(monkeypatch):
    found = planted(monkeypatch, lambda text: text.replace("bar.warp.sync", "//"))
    assert any(h.kind == "race" and "ld.shared" in h.message and "lane 2 " in h.message for h in found)


EXCHANGE = """
mov.u32 %r10, memory;
shl.b32 %r11, %r0, 2;
add.u32 %r12, %r10, %r11;
st.shared.u32 [%r12], %r3;
{}
xor.b32 %r13, %r11, {};
add.u32 %r14, %r10, %r13;
ld.shared.u32 %r15, [%r14];
st.global.u32 [%d2], %r15;
ret;
"""


@pytest.mark.parametrize(
    ("barrier", "distance", "clean"),
    [
        ("bar.sync 0;", 256, True),
        ("", 256, False),
        ("bar.warp.sync -1;", 4, True),
        ("bar.warp.sync -1;", 256, False),
        ("", 4, False),
        ("", 0, True),
    ],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_words_exchanged_need_the_barrier_that_reaches_so_far(barrier, distance, clean, schedule):
    text = kernel_text(THREAD + EXCHANGE.format(barrier, distance), shared=512)
    found = findings(text, [words(128)], schedule=named(schedule, 3))
    # Under some schedules the other has not written yet: then it is the write that comes too late.
    assert {h.kind for h in found} <= (set() if clean else {"race", "unwritten"})
    assert bool(len(found)) != clean
    if not clean and any(h.kind == "race" for h in found):
        (race, *_) = (h for h in found if h.kind == "race")
        assert race.barrier.startswith("memory")
        assert race.line
        assert "PTX line" in race.other


def test_bytes_of_one_word_written_by_different_lanes_do_not_conflict():
    body = """
    mov.u32 %r10, memory;
    add.u32 %r12, %r10, %r0;
    cvt.u16.u32 %h1, %r0;
    st.shared.u8 [%r12], %h1;
    bar.sync 0;
    ld.shared.u8 %h2, [%r12];
    cvt.u32.u16 %r13, %h2;
    st.global.u32 [%d2], %r13;
    ret;
    """
    out = words(128)
    assert str(findings(kernel_text(THREAD + body, shared=128), [out])) == ""
    assert (out == np.arange(128)).all()


def test_lanes_of_one_store_with_different_values_for_one_address_are_found():
    body = "mov.u32 %r10, memory;\nst.shared.u32 [%r10], {};\nret;"
    (found,) = findings(kernel_text(THREAD + body.format("%r0"), shared=16), [words(32)], block=32)
    assert found.kind == "race"
    assert "different values" in found.message
    assert str(findings(kernel_text(THREAD + body.format("7"), shared=16), [words(32)], block=32)) == ""


def test_what_no_one_wrote_is_reported_and_the_kernel_goes_on():
    body = """
    mov.u32 %r10, memory;
    ld.shared.u32 %r11, [%r10];
    st.global.u32 [%d2], %r11;
    ret;
    """
    out = words(32)
    (found,) = findings(kernel_text(THREAD + body, shared=16), [out], block=32)
    assert (found.kind, found.lane, found.barrier) == ("unwritten", 0, "memory")
    assert (out == 0xCBCBCBCB).all()


PEER = """
mov.u32 %r10, memory;
mov.u32 %r11, %cluster_ctarank;
xor.b32 %r12, %r11, 1;
st.shared.u32 [%r10], %r11;
barrier.cluster.arrive;
barrier.cluster.wait;
mapa.shared::cluster.u32 %r13, %r10, %r12;
ld.shared::cluster.u32 %r14, [%r13];
st.global.u32 [%d2], %r14;
{}
ret;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("last", ["barrier.cluster.arrive;\nbarrier.cluster.wait;", ""])
def test_a_cta_that_exits_while_its_peer_reads_its_memory_is_found(last, schedule):
    text = kernel_text(THREAD + PEER.format(last), shared=16)
    found = findings(text, [words(64)], grid=2, block=32, cluster=2, schedule=named(schedule, 2))
    assert {h.kind for h in found} == (set() if last else {"exited"})


THROUGH_GLOBAL_MEMORY = """
.shared .align 8 .b64 full;
mov.u32 %r10, memory;
mov.u32 %r11, full;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra MADE;
mbarrier.init.shared.b64 [%r11], 1;
MADE:
st.global.u32 [%d2], %r3;
{fence}
{barrier}
@%p1 bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 _, [%r11], 512;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r10], [%d0], 512, [%r11];
WAIT:
mbarrier.try_wait.parity.shared.b64 %p2, [%r11], 0;
@!%p2 bra WAIT;
bar.sync 0;
shl.b32 %r12, %r0, 2;
add.u32 %r13, %r10, %r12;
ld.shared.u32 %r14, [%r13];
add.u32 %r14, %r14, 1;
st.shared.u32 [%r13], %r14;
fence.proxy.async;
bar.sync 0;
@%p1 bra DONE;
cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r10], 512;
cp.async.bulk.commit_group;
{wait}
DONE:
bar.sync 0;
ld.global.u32 %r15, [%d2];
st.shared.u32 [%r13], %r15;
ret;
"""


@pytest.mark.parametrize(
    ("missing", "kinds"),
    [
        ({}, set()),
        ({"fence": "fence.proxy.async.global;"}, set()),
        ({"fence": ""}, {"unfenced"}),
        ({"fence": "fence.proxy.async.shared::cta;"}, {"unfenced"}),
        ({"wait": "cp.async.bulk.wait_group.read 0;"}, {"race"}),
    ],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copies_and_threads_that_meet_in_global_memory_need_fences_and_waits(missing, kinds, schedule):
    given = {"fence": "fence.proxy.async;", "barrier": "bar.sync 0;", "wait": "cp.async.bulk.wait_group 0;"}
    text = kernel_text(THREAD + THROUGH_GLOBAL_MEMORY.format(**given | missing), shared=512)
    array = np.zeros(132, np.uint32)
    aligned = array[(-array.ctypes.data // 4) % 4 :][:128]
    found = findings(text, [aligned], schedule=named(schedule, 1))
    assert {h.kind for h in found} == kinds
    assert all(h.barrier == "p0" for h in found)
