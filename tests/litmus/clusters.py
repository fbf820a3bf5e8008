"""Clusters: their barrier, each other's shared memory, remote arrivals and multicast."""

from litmus.pair import CLUSTER, Litmus, broken, wait

SYNC = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
SEND = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
FULL = {"full": 8, "data": 1024}

EXCHANGE = f"""
add.u32 %r1, %data, %own; mapa.shared::cluster.u32 %r2, %r1, %peer;
st.shared.b32 [%r1], %t;
barrier.cluster.arrive.release.aligned;    //- no barrier, relaxed arrival
//+ relaxed arrival: barrier.cluster.arrive.relaxed.aligned;
barrier.cluster.wait.acquire.aligned;      //- no barrier
ld.shared::cluster.b32 %r3, [%r2];
st.global.b32 [%result], %r3;
{SYNC}                                     //- peer exits, overwritten early
//+ overwritten early: st.shared.b32 [%r1], 7; {SYNC}
"""

EARLY_WAIT = f"""
add.u32 %r1, %data, %own; mapa.shared::cluster.u32 %r2, %r1, %peer;
st.shared.b32 [%r1], %t;                   //- arrives before it writes
barrier.cluster.arrive.release.aligned;
//+ arrives before it writes: st.shared.b32 [%r1], %t;
barrier.cluster.wait.acquire.aligned;
ld.shared::cluster.b32 %r3, [%r2];
st.global.b32 [%result], %r3;
{SYNC}
"""

REMOTE = f"""
add.u32 %r1, %data, %own; mapa.shared::cluster.u32 %r2, %r1, 0; mapa.shared::cluster.u32 %r4, %full, 0;
@%zero mbarrier.init.shared.b64 [%full], 64;
@%zero fence.mbarrier_init.release.cluster;
{SYNC}                                                          //- initialised unseen
@%first bra READER;
st.shared::cluster.b32 [%r2], %t;                               //- arrives before it writes
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4];   //- nobody arrives
//+ arrives before it writes: st.shared::cluster.b32 [%r2], %t;
bra DONE;
READER:
{wait("%full", 0, CLUSTER)}   //- nobody waits
ld.shared.b32 %r3, [%r1];
st.global.b32 [%result], %r3;
DONE:
{SYNC}
"""

INITIALISED = f"""
mapa.shared::cluster.u32 %r4, %full, %peer;
@%zero mbarrier.init.shared.b64 [%full], 64;
@%zero fence.mbarrier_init.release.cluster;                     //- no fence
barrier.cluster.arrive.relaxed.aligned;
barrier.cluster.wait.acquire.aligned;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4];
{wait("%full", 0, CLUSTER)}
{SYNC}
"""

LAST_ARRIVAL = f"""
mapa.shared::cluster.u32 %r4, %full, 0;
@%zero mbarrier.init.shared.b64 [%full], 64;
@%zero fence.mbarrier_init.release.cluster;
{SYNC}
@!%first mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4];
@!%first bra DONE;
{wait("%full", 0, CLUSTER)}   //- exits before the arrival
DONE:
"""

MULTICAST = f"""
shl.b32 %r5, %t, 3; add.u32 %r1, %data, %r5; shl.b32 %r6, %rank, 8;
@%zero mbarrier.init.shared.b64 [%full], 1;
@%zero fence.mbarrier_init.release.cluster;
{SYNC}                                                                    //- sent before the peer is ready
@!%zero bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 _, [%full], 512; //- bytes of its own alone
//+ bytes of its own alone: mbarrier.arrive.expect_tx.shared.b64 _, [%full], 256;
add.u32 %r7, %data, %r6; mov.b16 %h1, 3;
{SEND} [%r7], [%in], 256, [%full], %h1;
WAIT:
{wait("%full")}                                                           //- nobody waits
ld.shared.b32 %r3, [%r1];
st.global.b32 [%result], %r3;
//+ nobody waits: {wait("%full")}
{SYNC}                                                                    //- refilled while the peer reads
@!%zero bra AGAIN;
mbarrier.arrive.expect_tx.shared.b64 _, [%full], 512;
{SEND} [%r7], [%in], 256, [%full], %h1;
AGAIN:
{wait("%full", 1)}                                                        //- exits while the peer sends
{SYNC}                                                                    //- exits while the peer sends
"""

TO_PEER = f"""
add.u32 %r1, %data, %own;
mapa.shared::cluster.u32 %r2, %data, %peer; mapa.shared::cluster.u32 %r4, %full, %peer;
@%zero mbarrier.init.shared.b64 [%full], 1;
@%zero mbarrier.arrive.expect_tx.shared.b64 _, [%full], 256;
@%zero fence.mbarrier_init.release.cluster;
st.shared.b32 [%r1], %t;
fence.proxy.async.shared::cta;                                            //- no fence
{SYNC}
@!%zero bra WAIT;
add.u32 %r2, %r2, 512;
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r2], [%data], 256, [%r4];
WAIT:
{wait("%full")}                                                           //- nobody waits
ld.shared.b32 %r3, [%r1+512];
st.global.b32 [%result], %r3;
{SYNC}
"""

SENT = f"""
mapa.shared::cluster.u32 %r1, %data, %peer; add.u32 %r1, %r1, %own; add.u32 %r2, %data, %other;
mapa.shared::cluster.u32 %r4, %full, %peer;
@%zero mbarrier.init.shared.b64 [%full], 1;
@%zero fence.mbarrier_init.release.cluster;
@%zero mbarrier.arrive.expect_tx.shared.b64 _, [%full], 256;   //- bytes of one warp
//+ bytes of one warp: @%zero mbarrier.arrive.expect_tx.shared.b64 _, [%full], 128;
{SYNC}                                                         //- sent before the peer is ready
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %t, [%r4];
{wait("%full", 0, CLUSTER)}                                    //- nobody waits
ld.shared.b32 %r3, [%r2];
st.global.b32 [%result], %r3;
//+ nobody waits: {wait("%full", 0, CLUSTER)}
@%zero mbarrier.arrive.expect_tx.shared.b64 _, [%full], 256;
{SYNC}                                                         //- sent again while the peer reads
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %t, [%r4];
{wait("%full", 1, CLUSTER)}                                    //- exits while the peer sends
{SYNC}                                                         //- exits while the peer sends
"""

CANCEL = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128"
CANCELLED = f"""
.reg .b128 %answer;
@%zero mbarrier.init.shared.b64 [%full], 1;
bar.sync 0;
@%zero mbarrier.arrive.expect_tx.shared.b64 _, [%full], 16;
@%zero {CANCEL} [%data], [%full];
{wait("%full")}                                 //- nobody waits
ld.shared.b128 %answer, [%data];
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, %answer;
selp.b32 %r3, 1, 0, %p1;
st.global.b32 [%result], %r3;
//+ nobody waits: {wait("%full")}
bar.sync 0;                                     //- asked again while others read
@%zero mbarrier.arrive.expect_tx.shared.b64 _, [%full], 16;
@%zero {CANCEL} [%data], [%full];
{wait("%full", 1)}                              //- exits before the answer
"""

LITMUS = [
    Litmus(
        "cluster launch control",
        CANCELLED,
        {
            "nobody waits": broken("9.7.13.15.16", "race", barrier="data"),
            "asked again while others read": broken("9.7.13.16.1", "race", barrier="data"),
            "exits before the answer": broken("9.7.13.16.1", "leak"),
        },
        FULL,
        target="sm_100a",
    ),
    Litmus(
        "barrier of the cluster",
        EXCHANGE,
        {
            "no barrier": broken("9.7.13.3", "race", "exited"),
            "relaxed arrival": broken("9.7.13.3", "race", barrier="data"),
            "peer exits": broken("9.7.13.3", "exited"),
            "overwritten early": broken("9.7.13.3", "race", barrier="data"),
        },
        cluster=2,
    ),
    Litmus(
        "split barrier of the cluster",
        EARLY_WAIT,
        {"arrives before it writes": broken("9.7.13.3", "race", barrier="data")},
        cluster=2,
    ),
    Litmus(
        "remote mbarrier",
        REMOTE,
        {
            "initialised unseen": broken("9.7.13.15.9", "race", "barrier", "deadlock"),
            "arrives before it writes": broken("9.7.13.15.13", "race", barrier="data"),
            "nobody arrives": broken("9.7.13.15.13", "deadlock", barrier="full"),
            "nobody waits": broken("9.7.13.15.16", "race", barrier="data"),
        },
        FULL,
        cluster=2,
    ),
    Litmus(
        "mbarrier initialisation for the cluster",
        INITIALISED,
        {"no fence": broken("9.7.13.4", "barrier", barrier="full")},
        FULL,
        cluster=2,
    ),
    Litmus(
        "arrival at a CTA that may have exited",
        LAST_ARRIVAL,
        {"exits before the arrival": broken("9.7.13.15.13", "exited")},
        FULL,
        cluster=2,
    ),
    Litmus(
        "multicast",
        MULTICAST,
        {
            "sent before the peer is ready": broken("9.7.9.25.4.1", "race", "barrier", "deadlock"),
            "bytes of its own alone": broken("9.7.9.25.4.1", "barrier", "race", "leak", "deadlock"),
            "nobody waits": broken("9.7.13.15.16", "race", barrier="data"),
            "refilled while the peer reads": broken("9.7.9.25.4.1", "race", barrier="data"),
            "exits while the peer sends": broken("9.7.9.25.4.1", "exited", "leak"),
        },
        FULL,
        cluster=2,
    ),
    Litmus(
        "st.async",
        SENT,
        {
            "bytes of one warp": broken("9.7.9.13", "barrier", "race", "deadlock", "leak"),
            "sent before the peer is ready": broken("9.7.13.15.9", "barrier", "deadlock", barrier="full"),
            "nobody waits": broken("9.7.9.13", "race", barrier="data"),
            "sent again while the peer reads": broken("9.7.9.13", "race", barrier="data"),
            "exits while the peer sends": broken("9.7.9.13", "exited", "leak"),
        },
        FULL,
        cluster=2,
    ),
    Litmus(
        "bulk copy to the peer",
        TO_PEER,
        {
            "no fence": broken("8.6", "unfenced", barrier="data"),
            "nobody waits": broken("9.7.13.15.16", "race", barrier="data"),
        },
        FULL,
        cluster=2,
    ),
]
