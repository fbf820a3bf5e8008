"""Memory that no one wrote, that is not there, or that is addressed askew; registers and outputs alike."""

from litmus.pair import TILE, Litmus, broken, load, wait

WRITTEN = """
add.u32 %r1, %data, %own;
st.shared.b32 [%r1], %t;      //- never written
ld.shared.b32 %r3, [%r1];
st.global.b32 [%result], %r3;
"""

HALF = """
add.u32 %r1, %data, %own;
st.shared.b32 [%r1], %t;      //- half of each word: mov.b16 %h1, 7; st.shared.b16 [%r1], %h1;
ld.shared.b32 %r3, [%r1];
st.global.b32 [%result], %r3;
"""

SENT = """
add.u32 %r1, %data, %own;
st.shared.b32 [%r1], %t;      //- never written
fence.proxy.async.shared::cta;
bar.sync 0;
@!%zero bra DONE;
cp.async.bulk.global.shared::cta.bulk_group [%out], [%data], 256;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
DONE:
"""

OUTPUT = """
st.global.b32 [%result], %t;  //- never written
ld.global.b32 %r3, [%result];
setp.eq.u32 %p1, %r3, 99;
@%p1 st.global.b32 [%result], %r3;
"""

REGISTER = """
setp.lt.u32 %p1, %t, 40;
@%p1 mov.b32 %r3, 1;
@!%p1 mov.b32 %r3, 2;         //- set in some lanes
add.u32 %r4, %r3, %t;
st.global.b32 [%result], %r4;
"""

PREDICATE = """
setp.lt.u32 %p1, %t, 40;      //- never set
@%p1 bra DONE;
st.global.b32 [%result], %t;
DONE:
"""

SHUFFLED = """
@!%lane0 bra SHARE;
mov.b32 %r3, 7;
SHARE:
shfl.sync.idx.b32 %r4, %r3, 0, 31, -1;   //- from a lane that has none: shfl.sync.idx.b32 %r4, %r3, 1, 31, -1;
st.global.b32 [%result], %r4;
"""

NOT_TAKEN = """
setp.lt.u32 %p1, %t, 1000;
add.u32 %r4, %r3, %t;
selp.b32 %r5, %t, %r4, %p1;   //- the one without a value is taken
//+ the one without a value is taken: selp.b32 %r5, %r4, %t, %p1;
st.global.b32 [%result], %r5;
"""

ADDRESSED = """
mov.b64 %d1, 0;               //- never set
add.u64 %d1, %d1, %result;
st.global.b32 [%d1], %t;
"""

BOUNDS = """
add.u32 %r1, %data, %own;
st.shared.b32 [%r1], %t;      //- past shared memory: st.shared.b32 [%r1+4096], %t;
st.global.b32 [%result], %t;  //- past the array: st.global.b32 [%result+16384], %t;
bar.sync 0;
@%zero st.shared.v2.b32 [%data+8], {%t, %t};   //- askew: @%zero st.shared.v2.b32 [%data+4], {%t, %t};
"""

MORE = "mbarrier.expect_tx.relaxed.cta.shared.b64 [%full],"
COPIES = f"""
@%zero mbarrier.init.shared.b64 [%full], 1;
bar.sync 0;
@!%zero bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 _, [%full], 512;
add.u32 %r1, %data, 0;        //- tile askew: add.u32 %r1, %data, 16;
{TILE} [%r1], [%map, {{0, 0}}], [%full];
//+ span askew: {MORE} 16; {load("%data+520", "%full", 16)}
//+ span of odd size: {MORE} 8; {load("%data+512", "%full", 8)}
WAIT:
{wait("%full")}
"""

CIRCLE = f"""
@%zero mbarrier.init.shared.b64 [%full], 32;
@%zero mbarrier.init.shared.b64 [%empty], 32;
bar.sync 0;
@!%w0 bra OTHER;
mbarrier.arrive.shared.b64 _, [%full];    //- each waits for the other
{wait("%empty")}
//+ each waits for the other: mbarrier.arrive.shared.b64 _, [%full];
bra DONE;
OTHER:
{wait("%full")}
mbarrier.arrive.shared.b64 _, [%empty];
DONE:
"""

FLAG = """
@%zero st.release.gpu.global.b32 [%out+8192], 1;   //- nobody sets it
@!%w1 bra DONE;
SPIN:
ld.acquire.gpu.global.b32 %r3, [%out+8192];
setp.eq.u32 %p1, %r3, 0;
@%p1 bra SPIN;
DONE:
"""

EXITED = """
@%w1 bra DONE;
bar.sync 1, 32;     //- waits for a warp that has exited: bar.sync 1, 64;
DONE:
"""

LITMUS = [
    Litmus("shared memory", WRITTEN, {"never written": broken("5.1.7", "unwritten")}),
    Litmus("parts of a word", HALF, {"half of each word": broken("5.1.7", "unwritten")}),
    Litmus("source of a bulk store", SENT, {"never written": broken("5.1.7", "unwritten")}),
    Litmus("output", OUTPUT, {"never written": broken("5.1.4", "unwritten")}, track_output=True),
    Litmus("register", REGISTER, {"set in some lanes": broken("5.1.1", "unwritten")}),
    Litmus("predicate", PREDICATE, {"never set": broken("5.1.1", "unwritten")}),
    Litmus("shuffled register", SHUFFLED, {"from a lane that has none": broken("5.1.1", "unwritten")}),
    Litmus(
        "value that is not taken",
        NOT_TAKEN,
        {"the one without a value is taken": broken("5.1.1", "unwritten")},
    ),
    Litmus("address in a register", ADDRESSED, {"never set": broken("5.1.1", "unwritten")}),
    Litmus(
        "bounds and alignment",
        BOUNDS,
        {
            "past shared memory": broken("5.1.7", "out of bounds"),
            "past the array": broken("5.1.4", "out of bounds"),
            "askew": broken("6.4.1", "misaligned"),
        },
    ),
    Litmus(
        "alignment of copies",
        COPIES,
        {
            "tile askew": broken("9.7.9.27.1.2", "misaligned"),
            "span askew": broken("9.7.9.25.4.1", "misaligned"),
            "span of odd size": broken("9.7.9.25.4.1", "misaligned"),
        },
        {"full": 8, "data": 1024},
    ),
    Litmus(
        "two that wait for each other",
        CIRCLE,
        {"each waits for the other": broken("9.7.13.15.16", "deadlock")},
        {"full": 8, "empty": 8},
    ),
    Litmus("flag in global memory", FLAG, {"nobody sets it": broken("8.11", "livelock")}),
    Litmus(
        "barrier and exited warps",
        EXITED,
        {"waits for a warp that has exited": broken("9.7.13.1", "deadlock")},
    ),
]
