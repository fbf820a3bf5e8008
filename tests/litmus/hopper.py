"""Products of a warpgroup (wgmma): their operands in shared memory and registers, and their accumulators."""

from attn4.emulator.units.matrix import MatrixDescriptor, encode_wgmma
from attn4.emulator.units.swizzle import Swizzle
from litmus.pair import Litmus, broken, load, wait

A = encode_wgmma(MatrixDescriptor(0, 1024, 128, Swizzle.NONE))
B = encode_wgmma(MatrixDescriptor(0, 128, 128, Swizzle.NONE))
OPERANDS = f"""
shr.u32 %s, %a, 4; cvt.u64.u32 %d1, %s; or.b64 %d1, %d1, {A};
shr.u32 %s, %b, 4; cvt.u64.u32 %d2, %s; or.b64 %d2, %d2, {B};
"""
LOADED = f"""
@%zero mbarrier.init.shared.b64 [%full], 1;
bar.sync 0;
@%zero mbarrier.arrive.expect_tx.shared.b64 _, [%full], 2304;
@%zero {load("%a", "%full", 2048)}
@%zero {load("%b", "%full", 256)}
"""
FORM = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
D = "{%r10, %r11, %r12, %r13}"
E = "{%r14, %r15, %r16, %r17}"
FRAGMENTS = "{%r20, %r21, %r22, %r23}"
FLAGS = "1, 1, 0, 0"
SHARED = {"full": 8, "a": 2048, "b": 256}

PRODUCT = f"""
{OPERANDS} {LOADED}
{wait("%full")}                               //- nobody waits
wgmma.fence.sync.aligned;                     //- no fence at all
{FORM} {D}, %d1, %d2, 0, {FLAGS};
{FORM} {D}, %d1, %d2, 1, {FLAGS};
wgmma.commit_group.sync.aligned;              //- not committed
//+ one group too early: {FORM} {D}, %d1, %d2, 1, {FLAGS}; wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;               //- no wait, one group too early
//+ one group too early: wgmma.wait_group.sync.aligned 1;
st.global.b32 [%result], %r10;
//+ no wait, not committed, one group too early: wgmma.wait_group.sync.aligned 0;
"""

TWO_GROUPS = f"""
{OPERANDS} {LOADED} {wait("%full")}
wgmma.fence.sync.aligned;
{FORM} {D}, %d1, %d2, 0, {FLAGS};
wgmma.commit_group.sync.aligned;
{FORM} {E}, %d1, %d2, 0, {FLAGS};
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 1;
st.global.b32 [%result], %r10;                //- the later one is read: st.global.b32 [%result], %r14;
wgmma.wait_group.sync.aligned 0;
st.global.b32 [%result], %r14;
"""

ACCUMULATED = f"""
{OPERANDS} {LOADED} {wait("%full")}
//+ fence before the registers are set: wgmma.fence.sync.aligned;
mov.b32 %r10, 0; mov.b32 %r11, 0; mov.b32 %r12, 0; mov.b32 %r13, 0;   //- adds to nothing
wgmma.fence.sync.aligned;                     //- fence before the registers are set
{FORM} {D}, %d1, %d2, 1, {FLAGS};
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
add.u32 %r10, %r10, 1;
wgmma.fence.sync.aligned;                     //- changed without a fence
{FORM} {D}, %d1, %d2, 1, {FLAGS};
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
st.global.b32 [%result], %r10;
"""

FROM_REGISTERS = f"""
{OPERANDS} {LOADED} {wait("%full")}
mov.b32 %r20, %t; mov.b32 %r21, %t; mov.b32 %r22, %t;
mov.b32 %r23, %t;                             //- fragment without a value, fragment set after the fence
wgmma.fence.sync.aligned;
//+ fragment set after the fence: mov.b32 %r23, %t;
{FORM} {D}, {FRAGMENTS}, %d2, 0, 1, 1, 0;
wgmma.commit_group.sync.aligned;
//+ fragment reused early: mov.b32 %r20, 7;
wgmma.wait_group.sync.aligned 0;
mov.b32 %r20, 7;
st.global.b32 [%result], %r10;
"""

OPERAND_REUSED = f"""
{OPERANDS} {LOADED} {wait("%full")}
wgmma.fence.sync.aligned;
{FORM} {D}, %d1, %d2, 0, {FLAGS};
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;              //- reused early
bar.sync 0;                                   //- other warps may still multiply
@%zero mbarrier.arrive.expect_tx.shared.b64 _, [%full], 2048;
@%zero {load("%a", "%full", 2048)}
{wait("%full", 1)}
//+ reused early: wgmma.wait_group.sync.aligned 0;
st.global.b32 [%result], %r10;
"""

OPERAND_WRITTEN = f"""
{OPERANDS}
shl.b32 %r1, %t, 4; add.u32 %r1, %r1, %a;
st.shared.v4.b32 [%r1], {{%t, %t, %t, %t}};
setp.lt.u32 %p1, %t, 16; shl.b32 %r2, %t, 4; add.u32 %r2, %r2, %b;
@%p1 st.shared.v4.b32 [%r2], {{%t, %t, %t, %t}};
fence.proxy.async.shared::cta;                //- no fence of the proxy
bar.sync 0;                                   //- no barrier
wgmma.fence.sync.aligned;
{FORM} {D}, %d1, %d2, 0, {FLAGS};
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
st.global.b32 [%result], %r10;
"""

OPERAND_COPIED = f"""
{OPERANDS}
shl.b32 %r1, %t, 4; cvt.u64.u32 %d3, %r1; add.u64 %d3, %d3, %in; add.u32 %r2, %r1, %b; add.u32 %r1, %r1, %a;
setp.lt.u32 %p1, %t, 16;
cp.async.cg.shared.global [%r1], [%d3], 16;
@%p1 cp.async.cg.shared.global [%r2], [%d3], 16;
cp.async.wait_all;                            //- no wait
fence.proxy.async.shared::cta;                //- no fence of the proxy
bar.sync 0;
wgmma.fence.sync.aligned;
{FORM} {D}, %d1, %d2, 0, {FLAGS};
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
st.global.b32 [%result], %r10;
"""

EXIT = f"""
{OPERANDS} {LOADED} {wait("%full")}
wgmma.fence.sync.aligned;
{FORM} {D}, %d1, %d2, 0, {FLAGS};
wgmma.commit_group.sync.aligned;              //- not committed
wgmma.wait_group.sync.aligned 0;              //- no wait
"""

SHAPES = f"""
{OPERANDS} {LOADED} {wait("%full")}
wgmma.fence.sync.aligned;
{FORM} {D}, %d1, %d2, 0, {FLAGS};
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;              //- another shape follows at once
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {D}, %d1, %d2, 1, {FLAGS};
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
st.global.b32 [%result], %r10;
"""


REGISTERS = """
setp.lt.u32 %p1, %w, 8;
@%p1 bra MATH;
setmaxnreg.dec.sync.aligned.u32 24;           //- nothing given back, too little given back
//+ too little given back: setmaxnreg.dec.sync.aligned.u32 40;
bra DONE;
MATH:
setmaxnreg.inc.sync.aligned.u32 240;
DONE:
"""


def hopper(name, body, mutants):
    return Litmus(name, body, mutants, SHARED, block=128)


LITMUS = [
    hopper(
        "wgmma",
        PRODUCT,
        {
            "nobody waits": broken("9.7.13.15.16", "race", barrier="a b"),
            "no fence at all": broken("9.7.15.7.1", "unfenced"),
            "not committed": broken("9.7.15.7.2", "pending register"),
            "no wait": broken("9.7.15.7.3", "pending register"),
            "one group too early": broken("9.7.15.7.3", "pending register"),
        },
    ),
    hopper(
        "two groups of products",
        TWO_GROUPS,
        {"the later one is read": broken("9.7.15.7.3", "pending register")},
    ),
    hopper(
        "accumulators set by threads",
        ACCUMULATED,
        {
            "adds to nothing": broken("9.7.15.5.2", "unwritten"),
            "fence before the registers are set": broken("9.7.15.7.1", "unfenced"),
            "changed without a fence": broken("9.7.15.7.1", "unfenced"),
        },
    ),
    hopper(
        "A in registers",
        FROM_REGISTERS,
        {
            "fragment without a value": broken("9.7.15.5.2", "unwritten"),
            "fragment set after the fence": broken("9.7.15.7.1", "unfenced"),
            "fragment reused early": broken("9.7.15.7.3", "pending register"),
        },
    ),
    hopper(
        "operands of wgmma reused",
        OPERAND_REUSED,
        {
            "reused early": broken("9.7.15.7.3", "race", barrier="a"),
            "other warps may still multiply": broken("9.7.13.1", "race", barrier="a"),
        },
    ),
    hopper(
        "operands of wgmma written by threads",
        OPERAND_WRITTEN,
        {
            "no fence of the proxy": broken("8.6", "unfenced", barrier="a b"),
            "no barrier": broken("9.7.13.1", "race", barrier="a b"),
        },
    ),
    hopper(
        "operands of wgmma copied by cp.async",
        OPERAND_COPIED,
        {
            "no wait": broken("9.7.9.25.3.3", "race", barrier="a b"),
            "no fence of the proxy": broken("8.6", "unfenced", barrier="a b"),
        },
    ),
    hopper(
        "exit after wgmma",
        EXIT,
        {
            "not committed": broken("9.7.15.7.2", "leak"),
            "no wait": broken("9.7.15.7.3", "leak"),
        },
    ),
    Litmus(
        "registers moved between warpgroups",
        REGISTERS,
        {
            "nothing given back": broken("9.7.19.5", "deadlock"),
            "too little given back": broken("9.7.19.5", "deadlock"),
        },
        block=384,
    ),
    hopper(
        "products of two forms",
        SHAPES,
        {"another shape follows at once": broken("9.7.15.7.1", "pending register", "unfenced")},
    ),
]
