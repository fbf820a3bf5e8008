"""mbarrier objects: who may use them, and what their phases promise."""

from litmus.pair import Litmus, broken, load, wait

ONE = {"full": 8, "data": 1024}
TWO = {"full": 8, "empty": 8, "data": 1024}

HANDOVER = f"""
add.u32 %r1, %data, %own; add.u32 %r2, %data, %other;
@%zero mbarrier.init.shared.b64 [%full], 32;   //- count too high
//+ count too high: @%zero mbarrier.init.shared.b64 [%full], 33;
//+ count too low: @%zero mbarrier.inval.shared.b64 [%full]; @%zero mbarrier.init.shared.b64 [%full], 31;
bar.sync 0;                                    //- initialised unseen
@!%w0 bra READER;
st.shared.b32 [%r1], %t;                       //- arrives before it writes
mbarrier.arrive.shared.b64 _, [%full];         //- nobody arrives, relaxed arrival
//+ relaxed arrival: mbarrier.arrive.relaxed.cta.shared.b64 _, [%full];
//+ arrives before it writes: st.shared.b32 [%r1], %t;
bra DONE;
READER:
{wait("%full")}                                //- nobody waits, wrong parity, relaxed wait
//+ wrong parity: {wait("%full", 1)}
//+ relaxed wait: {wait("%full", 0, "try_wait.parity.relaxed.cta.shared.b64")}
ld.shared.b32 %r3, [%r2];
st.global.b32 [%result], %r3;
DONE:
"""

RING = f"""
add.u32 %r1, %data, %own; add.u32 %r2, %data, %other;
@%zero mbarrier.init.shared.b64 [%full], 32;
@%zero mbarrier.init.shared.b64 [%empty], 32;
mov.u32 %r10, 0;
bar.sync 0;
@!%w0 bra CONSUME;
PRODUCE:
and.b32 %r11, %r10, 1; xor.b32 %r12, %r11, 1;
{wait("%empty", "%r12")}                       //- fills without asking
st.shared.b32 [%r1], %r10;                     //- full before it is filled
mbarrier.arrive.shared.b64 _, [%full];         //- one lap is not announced
//+ one lap is not announced: setp.ne.u32 %p1, %r10, 1; @%p1 mbarrier.arrive.shared.b64 _, [%full];
//+ full before it is filled: st.shared.b32 [%r1], %r10;
add.u32 %r10, %r10, 1;
setp.lt.u32 %p2, %r10, 4;
@%p2 bra PRODUCE;
bra DONE;
CONSUME:
and.b32 %r11, %r10, 1;                         //- parity stands still: mov.u32 %r11, 0;
{wait("%full", "%r11")}
ld.shared.b32 %r3, [%r2];                      //- empty before it is read
mbarrier.arrive.shared.b64 _, [%empty];        //- slots are never given back
//+ empty before it is read: ld.shared.b32 %r3, [%r2];
st.global.b32 [%result], %r3;
add.u32 %r10, %r10, 1;
setp.lt.u32 %p2, %r10, 4;
@%p2 bra CONSUME;
DONE:
"""

BYTES = f"""
add.u32 %r1, %data, %own;
@%zero mbarrier.init.shared.b64 [%full], 1;
bar.sync 0;
@%zero mbarrier.arrive.expect_tx.shared.b64 _, [%full], 256; //- no bytes expected
//+ no bytes expected: @%zero mbarrier.arrive.shared.b64 _, [%full];
//+ too many: @%zero mbarrier.expect_tx.relaxed.cta.shared.b64 [%full], 16;
@%zero {load("%data", "%full", 256)}                           //- nothing is sent, too few
//+ too few: @%zero {load("%data", "%full", 240)}
{wait("%full")}                                                //- nobody waits
ld.shared.b32 %r3, [%r1];
st.global.b32 [%result], %r3;
//+ nobody waits: {wait("%full")}
"""

LIFETIME = f"""
@%zero mbarrier.init.shared.b64 [%full], 64;
bar.sync 0;
mbarrier.arrive.shared.b64 _, [%full];
{wait("%full")}
//+ used as data while it lives: @%zero st.shared.b64 [%full], 0;
bar.sync 0;                                     //- given up while others wait
@%zero mbarrier.inval.shared.b64 [%full];       //- initialised twice
//+ used after it was given up: bar.sync 0; mbarrier.arrive.shared.b64 _, [%full];
@%zero mbarrier.init.shared.b64 [%full], 64;
bar.sync 0;
mbarrier.arrive.shared.b64 _, [%full];         //- surplus arrivals
//+ surplus arrivals: mbarrier.arrive.shared.b64 _, [%full], 2;
{wait("%full")}
"""

DROPPED = f"""
add.u32 %r1, %data, %own; add.u32 %r2, %data, %other;
@%zero mbarrier.init.shared.b64 [%full], 64;
bar.sync 0;
@!%w0 bra READER;
mbarrier.arrive_drop.shared.b64 _, [%full];    //- leaves without dropping out
//+ leaves without dropping out: mbarrier.arrive.shared.b64 _, [%full];
bra DONE;
READER:
mbarrier.arrive.shared.b64 _, [%full];
{wait("%full", 0)}
mbarrier.arrive.shared.b64 _, [%full];
{wait("%full", 1)}
DONE:
"""

LITMUS = [
    Litmus(
        "mbarrier handover",
        HANDOVER,
        {
            "count too high": broken("9.7.13.15", "deadlock", barrier="full"),
            "count too low": broken("9.7.13.15", "barrier"),
            "initialised unseen": broken("9.7.13.15.9", "race", "barrier", barrier="full"),
            "arrives before it writes": broken("9.7.13.15.13", "race", barrier="data"),
            "nobody arrives": broken("9.7.13.15.13", "deadlock", barrier="full"),
            "relaxed arrival": broken("9.7.13.15.13", "race", barrier="data"),
            "nobody waits": broken("9.7.13.15.16", "race", barrier="data"),
            "wrong parity": broken("9.7.13.15.16", "race", "deadlock"),
            "relaxed wait": broken("9.7.13.15.16", "race", barrier="data"),
        },
        ONE,
    ),
    Litmus(
        "mbarrier ring",
        RING,
        {
            "fills without asking": broken("9.7.13.15.16", "race", "deadlock"),
            "full before it is filled": broken("9.7.13.15.13", "race", barrier="data"),
            "one lap is not announced": broken("9.7.13.15.13", "deadlock"),
            "parity stands still": broken("9.7.13.15.16", "race", "deadlock"),
            "empty before it is read": broken("9.7.13.15.13", "race", barrier="data"),
            "slots are never given back": broken("9.7.13.15.13", "deadlock"),
        },
        TWO,
    ),
    Litmus(
        "mbarrier that counts bytes",
        BYTES,
        {
            "no bytes expected": broken("9.7.13.15.5.1", "race", "deadlock"),
            "too many": broken("9.7.13.15.5.1", "deadlock"),
            "nothing is sent": broken("9.7.13.15.5.1", "deadlock"),
            "too few": broken("9.7.13.15.5.1", "deadlock"),
            "nobody waits": broken("9.7.13.15.16", "race", barrier="data"),
        },
        ONE,
    ),
    Litmus(
        "life of an mbarrier",
        LIFETIME,
        {
            "used as data while it lives": broken("9.7.13.15.3", "barrier", "race"),
            "given up while others wait": broken("9.7.13.15.10", "race", "barrier"),
            "initialised twice": broken("9.7.13.15.9", "barrier"),
            "used after it was given up": broken("9.7.13.15.10", "barrier"),
            "surplus arrivals": broken("9.7.13.15.13", "barrier", "deadlock"),
        },
        ONE,
    ),
    Litmus(
        "threads that drop out of an mbarrier",
        DROPPED,
        {"leaves without dropping out": broken("9.7.13.15.14", "deadlock")},
        ONE,
    ),
]
