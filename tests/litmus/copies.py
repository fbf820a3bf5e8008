"""Asynchronous copies: cp.async, bulk copies of spans and tiles, and the proxy that they go through."""

from litmus.pair import TILE, Litmus, broken, load, wait

FULL = {"full": 8, "data": 1024}

SMALL = """
add.u32 %r1, %data, %own; add.u32 %r2, %data, %other;
cvt.u64.u32 %d1, %own; add.u64 %d1, %d1, %in;
//+ one group too early: cp.async.ca.shared.global [%r1+512], [%d1], 4; cp.async.commit_group;
cp.async.ca.shared.global [%r1], [%d1], 4;
cp.async.commit_group;          //- not committed
cp.async.wait_group 0;          //- no wait, one group too early
//+ one group too early: cp.async.wait_group 1;
ld.shared.b32 %r3, [%r1];
bar.sync 0;                     //- others do not know
ld.shared.b32 %r4, [%r2];
add.u32 %r3, %r3, %r4;
st.global.b32 [%result], %r3;
//+ no wait, not committed, one group too early: cp.async.wait_all;
"""

SMALL_ALL = """
add.u32 %r1, %data, %own;
cvt.u64.u32 %d1, %own; add.u64 %d1, %d1, %in;
cp.async.ca.shared.global [%r1], [%d1], 4;
cp.async.wait_all;              //- no wait
ld.shared.b32 %r3, [%r1];
st.global.b32 [%result], %r3;
"""

SMALL_ARRIVES = f"""
add.u32 %r1, %data, %own; add.u32 %r2, %data, %other;
cvt.u64.u32 %d1, %own; add.u64 %d1, %d1, %in;
@%zero mbarrier.init.shared.b64 [%full], 64;
bar.sync 0;
cp.async.ca.shared.global [%r1], [%d1], 4;           //- arrives before it copies
cp.async.mbarrier.arrive.noinc.shared.b64 [%full];   //- threads arrive for it
//+ threads arrive for it: mbarrier.arrive.shared.b64 _, [%full];
//+ arrives before it copies: cp.async.ca.shared.global [%r1], [%d1], 4;
{wait("%full")}                                      //- nobody waits
ld.shared.b32 %r3, [%r2];
st.global.b32 [%result], %r3;
"""

LOADED = f"""
add.u32 %r1, %data, %own;
@%zero mbarrier.init.shared.b64 [%full], 1;
st.shared.b32 [%r1], 1;
ld.shared.b32 %r3, [%r1];
fence.proxy.async.shared::cta;                 //- written over without a fence
bar.sync 0;
@%zero mbarrier.arrive.expect_tx.shared.b64 _, [%full], 256;
@%zero {load("%data", "%full", 256)}
{wait("%full")}
ld.shared.b32 %r3, [%r1];
st.global.b32 [%result], %r3;
bar.sync 0;                                    //- loaded again while it is read
@%zero mbarrier.arrive.expect_tx.shared.b64 _, [%full], 256;
@%zero {load("%data", "%full", 256)}
{wait("%full", 1)}                             //- written while it is loaded
st.shared.b32 [%r1], 1;
{wait("%full", 1)}
"""

STORED = """
add.u32 %r1, %data, %own;
fence.proxy.async.shared::cta;
st.shared.b32 [%r1], %t;
fence.proxy.async.shared::cta;                 //- no fence, fence of global memory, fence of threads
//+ fence of global memory: fence.proxy.async.global;
//+ fence of threads: fence.acq_rel.gpu;
bar.sync 0;                                    //- no barrier
@!%zero bra STORED;
cp.async.bulk.global.shared::cta.bulk_group [%out], [%data], 256;
cp.async.bulk.commit_group;                    //- not committed
cp.async.bulk.wait_group.read 0;               //- no wait, one group too early
//+ one group too early: cp.async.bulk.wait_group.read 1;
STORED:
bar.sync 0;                                    //- others do not know
st.shared.b32 [%r1], 7;
//+ not committed: @%zero cp.async.bulk.commit_group;
bar.sync 0;
//+ no wait, one group too early, not committed: @%zero cp.async.bulk.wait_group.read 0;
"""

EXIT = """
add.u32 %r1, %data, %own;
st.shared.b32 [%r1], %t;
fence.proxy.async.shared::cta;
bar.sync 0;
@!%zero bra DONE;
cp.async.bulk.global.shared::cta.bulk_group [%out], [%data], 256;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;               //- no wait
DONE:
"""

EXIT_LOADED = f"""
@%zero mbarrier.init.shared.b64 [%full], 1;
bar.sync 0;
@%zero mbarrier.arrive.expect_tx.shared.b64 _, [%full], 256;
@%zero {load("%data", "%full", 256)}
{wait("%full")}                                //- nobody waits
"""

EXIT_SMALL = """
add.u32 %r1, %data, %own;
cvt.u64.u32 %d1, %own; add.u64 %d1, %d1, %in;
cp.async.ca.shared.global [%r1], [%d1], 4;
cp.async.wait_all;                             //- nobody waits
"""

TILE_LOADED = f"""
shl.b32 %r5, %t, 3; add.u32 %r1, %data, %r5;
@%zero mbarrier.init.shared.b64 [%full], 1;
bar.sync 0;
@!%zero bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 _, [%full], 512; //- bytes of half a tile
//+ bytes of half a tile: mbarrier.arrive.expect_tx.shared.b64 _, [%full], 256;
{TILE} [%data], [%map, {{0, 0}}], [%full];
WAIT:
{wait("%full")}                                             //- nobody waits
ld.shared.b32 %r3, [%r1];
st.global.b32 [%result], %r3;
//+ nobody waits: {wait("%full")}
"""

TILE_STORED = """
shl.b32 %r5, %t, 3; add.u32 %r1, %data, %r5;
st.shared.v2.b32 [%r1], {%t, %t};
fence.proxy.async.shared::cta;                              //- no fence, fence too early
//+ fence too early: fence.proxy.async.shared::cta; st.shared.v2.b32 [%r1], {%t, %w};
bar.sync 0;                                                 //- no barrier
@!%zero bra STORED;
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%outmap, {0, 0}], [%data];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;                            //- no wait
STORED:
bar.sync 0;
st.shared.v2.b32 [%r1], {%r5, %r5};
//+ no wait: @%zero cp.async.bulk.wait_group.read 0;
"""

TILE_ADDED = TILE_STORED.replace(
    "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group",
    "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group",
)

LITMUS = [
    Litmus(
        "cp.async",
        SMALL,
        {
            "not committed": broken("9.7.9.25.3.2", "race", barrier="data"),
            "no wait": broken("9.7.9.25.3.3", "race", barrier="data"),
            "one group too early": broken("9.7.9.25.3.3", "race", barrier="data"),
            "others do not know": broken("9.7.9.25.3.3", "race", barrier="data"),
        },
    ),
    Litmus(
        "cp.async that arrives at an mbarrier",
        SMALL_ARRIVES,
        {
            "arrives before it copies": broken("9.7.13.15.15", "race", barrier="data"),
            "threads arrive for it": broken("9.7.13.15.15", "race", barrier="data"),
            "nobody waits": broken("9.7.13.15.16", "race", barrier="data"),
        },
        FULL,
    ),
    Litmus("cp.async, all", SMALL_ALL, {"no wait": broken("9.7.9.25.3.3", "race", barrier="data")}),
    Litmus(
        "bulk load",
        LOADED,
        {
            "written over without a fence": broken("8.6", "unfenced", barrier="data"),
            "loaded again while it is read": broken("9.7.9.25.4.1", "race", barrier="data"),
            "written while it is loaded": broken("9.7.9.25.4.1", "race", barrier="data"),
        },
        FULL,
    ),
    Litmus(
        "bulk store",
        STORED,
        {
            "no fence": broken("8.6", "unfenced", barrier="data"),
            "fence of global memory": broken("8.6", "unfenced", barrier="data"),
            "fence of threads": broken("8.6", "unfenced", barrier="data"),
            "no barrier": broken("9.7.9.25.4.1", "race", "unfenced", barrier="data"),
            "not committed": broken("9.7.9.27.2.1", "race", barrier="data"),
            "no wait": broken("9.7.9.27.2.2", "race", barrier="data"),
            "one group too early": broken("9.7.9.27.2.2", "race", barrier="data"),
            "others do not know": broken("9.7.9.27.2.2", "race", barrier="data"),
        },
    ),
    Litmus("exit after a bulk store", EXIT, {"no wait": broken("9.7.9.27.2.2", "leak")}),
    Litmus("exit after a bulk load", EXIT_LOADED, {"nobody waits": broken("9.7.9.25.4.1", "leak")}, FULL),
    Litmus("exit after cp.async", EXIT_SMALL, {"nobody waits": broken("9.7.9.25.3.3", "leak")}),
    Litmus(
        "tile load",
        TILE_LOADED,
        {
            "bytes of half a tile": broken("9.7.9.27.1.2", "barrier", "race", "deadlock"),
            "nobody waits": broken("9.7.9.27.1.2", "race", barrier="data"),
        },
        FULL,
    ),
    Litmus(
        "tile store",
        TILE_STORED,
        {
            "no fence": broken("8.6", "unfenced", barrier="data"),
            "fence too early": broken("8.6", "unfenced", barrier="data"),
            "no barrier": broken("9.7.9.27.1.2", "race", "unfenced", barrier="data"),
            "no wait": broken("9.7.9.27.2.2", "race", barrier="data"),
        },
    ),
    Litmus(
        "tile reduction",
        TILE_ADDED,
        {
            "no fence": broken("8.6", "unfenced", barrier="data"),
            "fence too early": broken("8.6", "unfenced", barrier="data"),
            "no barrier": broken("9.7.9.27.1.2", "race", "unfenced", barrier="data"),
            "no wait": broken("9.7.9.27.2.2", "race", barrier="data"),
        },
    ),
]
