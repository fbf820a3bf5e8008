"""Barriers of threads: of a CTA, by number and count, and of a warp."""

from litmus.pair import Litmus, broken

EXCHANGE = """
add.u32 %r1, %data, %own; add.u32 %r2, %data, %other;
st.shared.b32 [%r1], %t;
bar.sync 0;                   //- no barrier
ld.shared.b32 %r3, [%r2];
st.global.b32 [%result], %r3;
bar.sync 0;                   //- overwritten early
st.shared.b32 [%r1], 7;
"""

HANDOVER = """
add.u32 %r1, %data, %own; add.u32 %r2, %data, %other;
@!%w0 bra READER;
st.shared.b32 [%r1], %t;      //- arrives before it writes
bar.arrive 1, 64;             //- nobody arrives
//+ arrives before it writes: st.shared.b32 [%r1], %t;
bar.sync 2, 64;               //- does not wait for the reader
st.shared.b32 [%r1], 7;
bra DONE;
READER:
bar.sync 1, 64;               //- reader only arrives: bar.arrive 1, 64;
ld.shared.b32 %r3, [%r2];
bar.arrive 2, 64;             //- reader is silent, does not wait for the reader
st.global.b32 [%result], %r3;
DONE:
"""

COUNTS = """
add.u32 %r1, %data, %own; add.u32 %r2, %data, %other;
st.shared.b32 [%r1], %t;
@%w0 bar.sync 3, 64;          //- counts differ: @%w0 bar.sync 3, 96;
@!%w0 bar.sync 3, 64;         //- numbers differ: @!%w0 bar.sync 4, 64;
ld.shared.b32 %r3, [%r2];
st.global.b32 [%result], %r3;
"""

VOTE = """
add.u32 %r1, %data, %own; add.u32 %r2, %data, %other;
st.shared.b32 [%r1], %t;
barrier.cta.red.popc.u32 %r4, 0, %w0;   //- only a vote of the warp: vote.sync.ballot.b32 %r4, %w0, -1;
ld.shared.b32 %r3, [%r2];
add.u32 %r3, %r3, %r4;
st.global.b32 [%result], %r3;
"""

WARP = """
add.u32 %r1, %data, %own;
xor.b32 %r2, %r1, 64;
st.shared.b32 [%r1], %t;
bar.warp.sync -1;     //- no barrier
ld.shared.b32 %r3, [%r2];
bar.warp.sync -1;     //- overwritten early
st.shared.b32 [%r1], %r3;
"""

SHUFFLED = """
add.u32 %r1, %data, %own;
xor.b32 %r2, %r1, 64;
st.shared.b32 [%r1], %t;
bar.warp.sync -1;     //- a shuffle instead: shfl.sync.bfly.b32 %r4, %t, 16, 31, -1;
ld.shared.b32 %r3, [%r2];
st.global.b32 [%result], %r3;
"""

HALVES = """
add.u32 %r1, %data, %own;
xor.b32 %r2, %r1, 64;
setp.lt.u32 %p1, %l, 16;
@!%p1 bra UPPER;
st.shared.b32 [%r1], %t;
bar.warp.sync -1;     //- halves by themselves: bar.warp.sync 0xFFFF;
bra DONE;
UPPER:
bar.warp.sync -1;     //- halves by themselves: bar.warp.sync 0xFFFF0000;
ld.shared.b32 %r3, [%r2];
st.global.b32 [%result], %r3;
DONE:
"""

ONE_WORD = """
@%zero st.shared.b32 [%data], %t;   //- all lanes write: @%w0 st.shared.b32 [%data], %t;
bar.sync 0;
ld.shared.b32 %r3, [%data];
st.global.b32 [%result], %r3;
"""

COUNTER = """
@%zero st.shared.b32 [%data], 0;
bar.sync 0;
@%lane0 atom.shared.add.u32 %r3, [%data], 1;   //- no atomic: @%lane0 ld.shared.b32 %r3, [%data];
//+ no atomic: @%lane0 st.shared.b32 [%data], 1;
bar.sync 0;
ld.shared.b32 %r3, [%data];
st.global.b32 [%result], %r3;
"""

ALIGNED = """
setp.lt.u32 %p1, %l, 7;
bar.sync 0;              //- half a warp: @%p1 bar.sync 0;
"""

BYTES = """
add.u32 %r1, %data, %t;
mov.b32 %r2, 7;
st.shared.b8 [%r1], %r2;   //- words over bytes: and.b32 %r1, %r1, -4; st.shared.b32 [%r1], %t;
"""

FLAG = """
add.u32 %r1, %data, %own; add.u32 %r2, %data, %other;
@!%w0 bra READER;
st.shared.b32 [%r1], %t;
bar.warp.sync -1;                                     //- other lanes have no part in it
@%lane0 st.release.cta.global.b32 [%out+8192], 1;     //- store without release
//+ store without release: @%lane0 st.relaxed.cta.global.b32 [%out+8192], 1;
bra DONE;
READER:
ld.acquire.cta.global.b32 %r3, [%out+8192];           //- load without acquire
//+ load without acquire: ld.relaxed.cta.global.b32 %r3, [%out+8192];
setp.eq.u32 %p1, %r3, 0;
@%p1 bra READER;
ld.shared.b32 %r4, [%r2];
st.global.b32 [%result], %r4;
DONE:
"""

FENCED_FLAG = """
add.u32 %r1, %data, %own; add.u32 %r2, %data, %other;
@!%w0 bra READER;
st.shared.b32 [%r1], %t;
bar.warp.sync -1;
@%lane0 fence.acq_rel.cta;                            //- no fence before the store
@%lane0 st.relaxed.cta.global.b32 [%out+8192], 1;
bra DONE;
READER:
ld.relaxed.cta.global.b32 %r3, [%out+8192];
setp.eq.u32 %p1, %r3, 0;
@%p1 bra READER;
fence.acq_rel.cta;                                    //- no fence behind the load
ld.shared.b32 %r4, [%r2];
st.global.b32 [%result], %r4;
DONE:
"""

LOCK = """
@%zero st.shared.b32 [%data], 0;
@%zero st.shared.b32 [%data+4], 0;
bar.sync 0;
@!%lane0 bra DONE;
TAKE:
atom.acquire.cta.shared.cas.b32 %r3, [%data], 0, 1;   //- taken without acquire
//+ taken without acquire: atom.relaxed.cta.shared.cas.b32 %r3, [%data], 0, 1;
setp.ne.u32 %p1, %r3, 0;
@%p1 bra TAKE;
ld.shared.b32 %r4, [%data+4];
add.u32 %r4, %r4, 1;
st.shared.b32 [%data+4], %r4;
atom.release.cta.shared.exch.b32 %r5, [%data], 0;     //- given back without release
//+ given back without release: atom.relaxed.cta.shared.exch.b32 %r5, [%data], 0;
DONE:
"""

LITMUS = [
    Litmus(
        "lock in shared memory",
        LOCK,
        {
            "taken without acquire": broken("8.8", "race", barrier="data"),
            "given back without release": broken("8.8", "race", barrier="data"),
        },
    ),
    Litmus(
        "barrier of the CTA",
        EXCHANGE,
        {
            "no barrier": broken("9.7.13.1", "race", barrier="data"),
            "overwritten early": broken("9.7.13.1", "race", barrier="data"),
        },
    ),
    Litmus(
        "named barrier, arrive and sync",
        HANDOVER,
        {
            "arrives before it writes": broken("9.7.13.1", "race"),
            "nobody arrives": broken("9.7.13.1", "deadlock"),
            "does not wait for the reader": broken("9.7.13.1", "race"),
            "reader only arrives": broken("9.7.13.1", "race"),
            "reader is silent": broken("9.7.13.1", "deadlock"),
        },
    ),
    Litmus(
        "barriers by number and count",
        COUNTS,
        {
            "counts differ": broken("9.7.13.1", "barrier"),
            "numbers differ": broken("9.7.13.1", "deadlock"),
        },
    ),
    Litmus("barrier with a reduction", VOTE, {"only a vote of the warp": broken("9.7.13.1", "race")}),
    Litmus(
        "barrier of a warp",
        WARP,
        {
            "no barrier": broken("9.7.13.2", "race", barrier="data"),
            "overwritten early": broken("9.7.13.2", "race", barrier="data"),
        },
    ),
    Litmus("shuffles order nothing", SHUFFLED, {"a shuffle instead": broken("9.7.13.2", "race")}),
    Litmus("mask of a warp barrier", HALVES, {"halves by themselves": broken("9.7.13.2", "race")}),
    Litmus("one word, one writer", ONE_WORD, {"all lanes write": broken("8.7.1", "race")}),
    Litmus("atomic counter", COUNTER, {"no atomic": broken("8.7.1", "race")}),
    Litmus(
        "flag with release and acquire",
        FLAG,
        {
            "other lanes have no part in it": broken("8.8", "race", barrier="data"),
            "store without release": broken("8.8", "race", barrier="data"),
            "load without acquire": broken("8.8", "race", barrier="data"),
        },
    ),
    Litmus(
        "flag between fences",
        FENCED_FLAG,
        {
            "no fence before the store": broken("8.8", "race", barrier="data"),
            "no fence behind the load": broken("8.8", "race", barrier="data"),
        },
    ),
    Litmus("aligned barrier", ALIGNED, {"half a warp": broken("9.7.13.1", "divergence")}),
    Litmus("bytes of one word", BYTES, {"words over bytes": broken("8.7.1", "race")}),
]
