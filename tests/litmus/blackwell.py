"""Tensor memory and tcgen05: allocation, products and their commits, loads, stores and their waits, pairs."""

from attn4.emulator.units.matrix import MatrixDescriptor, encode_tcgen05
from attn4.emulator.units.swizzle import Swizzle
from litmus.pair import CLUSTER, Litmus, broken, load, wait

M, N, K = 128, 16, 16
A_BYTES, B_BYTES = M * K * 2, N * K * 2
A = encode_tcgen05(MatrixDescriptor(0, M * 16, 128, Swizzle.NONE))
B = encode_tcgen05(MatrixDescriptor(0, N * 16, 128, Swizzle.NONE))
FORM = 1 << 4 | 1 << 7 | 1 << 10 | N >> 3 << 17 | M >> 4 << 24
"""float32 += bfloat16 * bfloat16."""
PAIR_FORM = 1 << 4 | 1 << 7 | 1 << 10 | 2 * N >> 3 << 17 | 2 * M >> 4 << 24
SHARED = {"slot": 16, "full": 8, "done": 8, "free": 8, "a": A_BYTES, "b": B_BYTES}

COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%done];"
MMA = f"tcgen05.mma.cta_group::1.kind::f16 [%tm], %d1, %d2, {FORM}"
ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32"
BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
LD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%mine];"
ST = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%mine], {%t};"

ALLOCATED = f"""
.reg .b32 %tm, %mine;
@%zero mbarrier.init.shared.b64 [%full], 1;
@%zero mbarrier.init.shared.b64 [%done], 1;
@%zero mbarrier.init.shared.b64 [%free], 4;
@%w0 {ALLOC} [%slot], 64;
"""
ADDRESS = f"""
bar.sync 0;
{AFTER}
ld.shared.b32 %tm, [%slot];
shl.b32 %mine, %w, 21; add.u32 %mine, %mine, %tm;
"""
FREED = f"""
{BEFORE}
bar.sync 0;
{AFTER}
@%w0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tm, 64;
"""
OPERANDS = f"""
shr.u32 %s, %a, 4; cvt.u64.u32 %d1, %s; or.b64 %d1, %d1, {A};
shr.u32 %s, %b, 4; cvt.u64.u32 %d2, %s; or.b64 %d2, %d2, {B};
@%zero mbarrier.arrive.expect_tx.shared.b64 _, [%full], {A_BYTES + B_BYTES};
@%zero {load("%a", "%full", A_BYTES)}
@%zero {load("%b", "%full", B_BYTES)}
"""

PRODUCT = f"""
{ALLOCATED} {ADDRESS} {OPERANDS}
@!%zero bra WAIT;
{wait("%full")}                               //- operands not waited for
{MMA}, 0;
{MMA}, 1;
{COMMIT}                                      //- not committed
//+ operands not waited for: {wait("%full")}
WAIT:
{wait("%done")}                               //- product not waited for
{AFTER}                                       //- no fence after
{LD}
tcgen05.wait::ld.sync.aligned;
st.global.b32 [%result], %r3;
//+ product not waited for: {wait("%done")}
{FREED}
"""

OVERWRITTEN = f"""
{ALLOCATED} {ADDRESS} {OPERANDS}
@!%zero bra WAIT;
{wait("%full")}
{MMA}, 0;
{COMMIT}
WAIT:
{wait("%done")}
{AFTER}
{LD}
tcgen05.wait::ld.sync.aligned;                //- load not waited for
{BEFORE}                                      //- no fence before
@%lane0 mbarrier.arrive.shared.b64 _, [%free];
@!%zero bra AGAIN;
{wait("%free")}                               //- overwritten early
{AFTER}                                       //- no fence after
{MMA}, 0;
{COMMIT}
AGAIN:
//+ overwritten early: {wait("%free")}
st.global.b32 [%result], %r3;
{wait("%done", 1)}                            //- exits while it is computed
{FREED}
"""

A_FROM_TENSOR = f"""
{ALLOCATED} {ADDRESS} {OPERANDS}
add.u32 %mine, %mine, 32;
tcgen05.st.sync.aligned.32x32b.x8.b32 [%mine], {{%t, %t, %t, %t, %t, %t, %t, %t}};
tcgen05.wait::st.sync.aligned;                //- store not waited for
{BEFORE}                                      //- no fence before
@%lane0 mbarrier.arrive.shared.b64 _, [%free];
@!%zero bra WAIT;
{wait("%full")}
{wait("%free")}                               //- threads not waited for
{AFTER}                                       //- no fence after
add.u32 %r4, %tm, 32;
tcgen05.mma.cta_group::1.kind::f16 [%tm], [%r4], %d2, {FORM}, 0;
{COMMIT}
//+ threads not waited for: {wait("%free")}
WAIT:
{wait("%done")}
{FREED}
"""

STORED = f"""
{ALLOCATED} {ADDRESS}
{ST}
tcgen05.wait::st.sync.aligned;                //- no wait
{LD}                                           //- wrong lanes
//+ wrong lanes: tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r3}}, [%tm+6291456];
//+ no wait: tcgen05.wait::st.sync.aligned;
tcgen05.wait::ld.sync.aligned;
st.global.b32 [%result], %r3;
//+ never written: tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r3}}, [%mine+8]; tcgen05.wait::ld.sync.aligned;
//+ past the end: tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r3}}, [%mine+512]; tcgen05.wait::ld.sync.aligned;
//+ not its own: tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r3}}, [%mine+64]; tcgen05.wait::ld.sync.aligned;
{FREED}
"""

SAME_LANES = f"""
{ALLOCATED} {ADDRESS}
and.b32 %r4, %w, 3; shl.b32 %mine, %r4, 21; add.u32 %mine, %mine, %tm;
setp.eq.u32 %p1, %w, 4;
@%p1 bra READER;
{ST}
tcgen05.wait::st.sync.aligned;                //- no wait
{BEFORE}                                      //- no fence before
READER:
bar.sync 0;                                   //- no barrier
@!%p1 bra DONE;
{AFTER}                                       //- no fence after
{LD}
tcgen05.wait::ld.sync.aligned;
st.global.b32 [%result], %r3;
DONE:
{FREED}
"""

CP_THEN_MMA = f"""
{ALLOCATED} {ADDRESS} {OPERANDS}
setp.eq.u32 %p1, %t, 32;
@!%zero bra OTHER;
{wait("%full")}
add.u32 %r4, %tm, 32;
tcgen05.cp.cta_group::1.128x256b [%r4], %d1;
tcgen05.mma.cta_group::1.kind::f16 [%tm], [%r4], %d2, {FORM}, 0;   //- by another thread
{COMMIT}
OTHER:
//+ by another thread: @!%p1 bra WAIT;
//+ by another thread: {wait("%full")}
//+ by another thread: add.u32 %r4, %tm, 32;
//+ by another thread: tcgen05.mma.cta_group::1.kind::f16 [%tm], [%r4], %d2, {FORM}, 0;
WAIT:
{wait("%done")}
{FREED}
"""

LIFETIME = f"""
{ALLOCATED}
@%w0 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
bar.sync 0;                                   //- address read before it is there
{AFTER}
ld.shared.b32 %tm, [%slot];
shl.b32 %mine, %w, 21; add.u32 %mine, %mine, %tm;
//+ address read before it is there: bar.sync 0;
//+ allocated after the permit was given up: @%w0 {ALLOC} [%slot], 32;
{ST}
tcgen05.wait::st.sync.aligned;                //- freed before the store is done
{BEFORE}
bar.sync 0;                                   //- freed while others use it
{AFTER}
@%w0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tm, 64;   //- never freed
//+ freed twice: @%w0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tm, 64;
//+ used after it was freed: bar.sync 0; {LD} tcgen05.wait::ld.sync.aligned;
//+ freed before the store is done: tcgen05.wait::st.sync.aligned;
"""

REUSED = f"""
{ALLOCATED} {ADDRESS} {OPERANDS}
@!%zero bra WAIT;
{wait("%full")}
{MMA}, 0;
{COMMIT}
{wait("%done")}                               //- operand reloaded early
mbarrier.arrive.expect_tx.shared.b64 _, [%full], {A_BYTES};
{load("%a", "%full", A_BYTES)}
{wait("%full", 1)}
WAIT:
{wait("%done")}
{FREED}
"""

WRITTEN = f"""
{ALLOCATED} {ADDRESS}
shr.u32 %s, %a, 4; cvt.u64.u32 %d1, %s; or.b64 %d1, %d1, {A};
shr.u32 %s, %b, 4; cvt.u64.u32 %d2, %s; or.b64 %d2, %d2, {B};
shl.b32 %r1, %t, 5; add.u32 %r1, %r1, %a;
st.shared.v4.b32 [%r1], {{%t, %t, %t, %t}}; st.shared.v4.b32 [%r1+16], {{%t, %t, %t, %t}};
shl.b32 %r2, %t, 2; add.u32 %r2, %r2, %b;
st.shared.b32 [%r2], %t;
fence.proxy.async.shared::cta;                //- no fence of the proxy
bar.sync 0;                                   //- no barrier
@!%zero bra WAIT;
{MMA}, 0;
{COMMIT}
WAIT:
{wait("%done")}
{FREED}
"""

COPIED = f"""
{ALLOCATED} {ADDRESS} {OPERANDS}
@!%zero bra WAIT;
{wait("%full")}                               //- source not waited for
tcgen05.cp.cta_group::1.128x128b [%tm], %d1;
{COMMIT}
//+ source not waited for: {wait("%full")}
WAIT:
{wait("%done")}                               //- copy not waited for
{AFTER}
{LD}
tcgen05.wait::ld.sync.aligned;
st.global.b32 [%result], %r3;
//+ copy not waited for: {wait("%done")}
{FREED}
"""

OTHER_THREAD = f"""
{ALLOCATED} {ADDRESS} {OPERANDS}
setp.eq.u32 %p1, %t, 32;
@!%zero bra OTHER;
{wait("%full")}
{MMA}, 0;
{COMMIT}
OTHER:
@!%p1 bra WAIT;
{wait("%full")}
{wait("%done")}                               //- not ordered with the first
{AFTER}                                       //- not ordered with the first
{MMA}, 1;
{COMMIT}
{wait("%done", 1)}
WAIT:
{FREED}
"""

PAIR = f"""
.reg .b32 %tm, %mine;
shr.u32 %s, %a, 4; cvt.u64.u32 %d1, %s; or.b64 %d1, %d1, {A};
shr.u32 %s, %b, 4; cvt.u64.u32 %d2, %s; or.b64 %d2, %d2, {B};
mapa.shared::cluster.u32 %r5, %full, 0;
@%zero mbarrier.init.shared.b64 [%full], 1;
@%zero mbarrier.init.shared.b64 [%done], 1;
@%zero mbarrier.init.shared.b64 [%free], 2;
@%zero fence.mbarrier_init.release.cluster;
@%w0 tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%slot], 64;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
{AFTER}
ld.shared.b32 %tm, [%slot];
shl.b32 %mine, %w, 21; add.u32 %mine, %mine, %tm;
@!%zero bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 _, [%full], {A_BYTES + B_BYTES};
{load("%a", "%full", A_BYTES)}
{load("%b", "%full", B_BYTES)}
{wait("%full")}                                                   //- own operands not waited for
mapa.shared::cluster.u32 %r6, %free, 0;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6];
@!%first bra WAIT;
{wait("%free", 0, CLUSTER)}   //- operands of the peer not waited for
tcgen05.mma.cta_group::2.kind::f16 [%tm], %d1, %d2, {PAIR_FORM}, 0;
mov.b16 %h1, 3;                                                   //- the peer is not told: mov.b16 %h1, 1;
tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%done], %h1;
WAIT:
{wait("%done")}                                                   //- product not waited for
{AFTER}
{LD}
tcgen05.wait::ld.sync.aligned;
st.global.b32 [%result], %r3;
//+ product not waited for: {wait("%done")}
//+ own operands not waited for: {wait("%full")}
{BEFORE}
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
{AFTER}
@%w0 tcgen05.dealloc.cta_group::2.sync.aligned.b32 %tm, 64;
"""


def blackwell(name, body, mutants, cluster=1, block=128):
    return Litmus(name, body, mutants, SHARED, block=block, cluster=cluster, target="sm_100a")


LITMUS = [
    blackwell(
        "tcgen05.mma",
        PRODUCT,
        {
            "operands not waited for": broken("9.7.13.15.16", "race", barrier="a b"),
            "not committed": broken("9.7.16.6.2.2", "deadlock", barrier="done"),
            "product not waited for": broken("9.7.16.6.4.4", "race"),
            "no fence after": broken("9.7.16.6.4.4", "unfenced"),
        },
    ),
    blackwell(
        "accumulator overwritten",
        OVERWRITTEN,
        {
            "load not waited for": broken("9.7.16.6.4.4", "race"),
            "no fence before": broken("9.7.16.6.4.4", "unfenced"),
            "no fence after": broken("9.7.16.6.4.4", "unfenced"),
            "overwritten early": broken("9.7.16.6.4.4", "race", "deadlock"),
            "exits while it is computed": broken("9.7.16.6.4.2", "leak", "tensor memory"),
        },
    ),
    blackwell(
        "A from tensor memory",
        A_FROM_TENSOR,
        {
            "store not waited for": broken("9.7.16.6.2.3", "race"),
            "no fence before": broken("9.7.16.6.4.4", "unfenced"),
            "threads not waited for": broken("9.7.16.6.4.4", "race"),
            "no fence after": broken("9.7.16.6.4.4", "unfenced"),
        },
    ),
    blackwell(
        "tcgen05.st, then ld",
        STORED,
        {
            "no wait": broken("9.7.16.6.4.2", "race"),
            "wrong lanes": broken("9.7.16.8.1", "tensor memory"),
            "never written": broken("9.7.16.1", "unwritten"),
            "past the end": broken("9.7.16.1", "tensor memory"),
            "not its own": broken("9.7.16.7.1", "tensor memory"),
        },
    ),
    blackwell(
        "tcgen05.st, then ld by another warp",
        SAME_LANES,
        {
            "no wait": broken("9.7.16.6.2.3", "race"),
            "no fence before": broken("9.7.16.6.4.4", "unfenced"),
            "no barrier": broken("9.7.16.6.4.4", "race"),
            "no fence after": broken("9.7.16.6.4.4", "unfenced"),
        },
        block=160,
    ),
    blackwell(
        "tcgen05.cp, then mma",
        CP_THEN_MMA,
        {"by another thread": broken("9.7.16.6.4.3", "race", "unfenced")},
    ),
    blackwell(
        "life of tensor memory",
        LIFETIME,
        {
            "address read before it is there": broken("9.7.16.7.1", "race", barrier="slot"),
            "allocated after the permit was given up": broken("9.7.16.7.1", "tensor memory"),
            "freed before the store is done": broken("9.7.16.6.2.3", "race"),
            "freed while others use it": broken("9.7.16.7.1", "race", "tensor memory"),
            "never freed": broken("9.7.16.7.1", "leak"),
            "freed twice": broken("9.7.16.7.1", "tensor memory"),
            "used after it was freed": broken("9.7.16.7.1", "tensor memory"),
        },
    ),
    blackwell(
        "operands of tcgen05.mma reloaded",
        REUSED,
        {"operand reloaded early": broken("9.7.16.6.2.2", "race", barrier="a")},
    ),
    blackwell(
        "operands of tcgen05.mma written by threads",
        WRITTEN,
        {
            "no fence of the proxy": broken("8.6", "unfenced", barrier="a b"),
            "no barrier": broken("9.7.13.1", "race", "unfenced", barrier="a b"),
        },
    ),
    blackwell(
        "tcgen05.cp",
        COPIED,
        {
            "source not waited for": broken("9.7.13.15.16", "race", barrier="a b"),
            "copy not waited for": broken("9.7.16.6.4.4", "race"),
        },
    ),
    blackwell(
        "products of two threads",
        OTHER_THREAD,
        {"not ordered with the first": broken("9.7.16.6.4.3", "race", "unfenced")},
    ),
    blackwell(
        "products of a pair of CTAs",
        PAIR,
        {
            "own operands not waited for": broken("9.7.13.15.16", "race", barrier="a b"),
            "operands of the peer not waited for": broken("9.7.13.15.16", "race", barrier="a b"),
            "the peer is not told": broken("9.7.16.6.2.2", "deadlock", barrier="done"),
            "product not waited for": broken("9.7.16.6.4.4", "race"),
        },
        cluster=2,
    ),
]
