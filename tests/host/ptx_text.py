"""PTX that the parser's tests share: a module with every form of statement, and how to print a kernel."""

from attn4.emulator.ptx import Module
from attn4.emulator.ptx.module import Kernel

MODULE = """\
//
// Written by hand: "forms" rather than sense
//
.version 9.4
.target sm_100a
.address_size 64

	// .globl	forms
.extern .shared .align 1024 .b8 __dynamic_shmem__0[];
.shared .align 8 .b8 unused[16];
.global .align 4 .b8 $str[6] = {104, 0x65, 108, 108, 111}; /* a comment; with { in
it */
.visible .const .f32 table[2][2] = {{0f3F800000, 2.0}, {-0.5, 0d4000000000000000}};

.visible .entry forms(
	.param .align 64 .b8 forms_param_0[128],
	.param .u32 forms_param_1,
	.param .u64 .ptr .global .align 16 forms_param_2,
	.param .align 8 .b8 forms_param_3[12],
	.param .f32 forms_param_4
)
.explicitcluster
.reqntid 128, 2, 1
.minnctapersm 1
.reqnctapercluster 2
{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<3>;
	.reg .b32 	%r<40>;
	.reg .f32 	%f<4>;
	.reg .b64 	%rd<20>;
	.reg .b128 	%rq;
	.shared .align 16 .b8 staged[64];
	.local .align 4 .b32 depot[4];

	.loc	1 20 3
	mov.b64 	%rd1, forms_param_0;
	mov.b64 	%rd2, table+8;
	ld.param.v2.b32 	{%r1, %r2}, [forms_param_3+4];
	mov.u32 	%r3, %tid.x;
	mov.u64 	%rd3, %globaltimer;
	mov.b32 	%r4, __dynamic_shmem__0;
	st.shared.b32 	[staged+8], WARP_SZ;
	st.local.b32 	[depot], %r1;
	ld.shared.b32 	%r5, [%r4+-16];
	ld.global.L1::no_allocate.v4.b32 	{%r6, _, %r7, %r8}, [%rd1 + 0x10];
	ld.shared.b32 	%r5, [1024];
	mov.b128 	%rq, {%rd1, %rd2};
	add.f32 	%f1, %f2, 0fBF800000;
	fma.rn.f32 	%f1, %f2, -1.5, 1e-3;
	add.f64 	%rd4, %rd5, 0dBFF0000000000000;
	add.s32 	%r9, %r10, -1;
	and.b64 	%rd6, %rd7, 0xFFFFFFFFFFFFFFFF;
	or.b64 	%rd6, %rd7, 4611686293305360384U;
	setp.ne.and.b32 	%p1|%p2, %r1, 0b101, !%p3;
	elect.sync 	%r11|%p1, -1;
	elect.sync 	_|%p4, -1;
	shfl.sync.idx.b32 	%r12|%p5, %r11, 0, 31, -1;
	@!%p1 bra.uni 	$L__BB0_2;
	// begin inline asm
	{
	.reg .pred       P1;
	LAB_WAIT:
	mbarrier.try_wait.parity.shared::cta.b64 P1, [%r4], %r5, 10000000;
	@P1 bra.uni DONE;
	bra.uni     LAB_WAIT;
	DONE:
	}
	// end inline asm
	.loc	2 7 1, function_name $L__info_string0+3, inlined_at 1 30 4
	{ .reg .pred P1; LAB_WAIT: mbarrier.try_wait.parity.shared::cta.b64 P1, [%r4+8], 1;
	@!P1 bra LAB_WAIT; {.reg .pred P1; .reg .b32 %r<2>; setp.eq.b32 P1, %r1, %r2; @P1 exit;} ; }
$L__BB0_2:
	.pragma "nounroll; or not";
	cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
		.cta_group::2.L2::cache_hint [%r4], [%rd1, {%r1, %r2, %r3, 0}], [%r5+8], %rs1, %rd8;
	cp.async.bulk.tensor.3d.im2col.global.shared::cta.bulk_group [%rd1, {%r1, %r2, %r3}], [%r4];
	cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r4], %r5;
	tcgen05.mma.cta_group::2.kind::f16.collector::a::lastuse [%r1], [%r2+64], %rd9, %r3,
		{%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27}, %p1;
	tcgen05.ld.sync.aligned.32x32b.x4.b32 	{%r13, %r14, %r15, %r16}, [%r17+32];
	tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r4], %rs2;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd10, %rd11, %p1, 1, 1, 0, 0;
	mbarrier.arrive.expect_tx.shared.b64 	_, [%r4], 0x4000;
	bar.sync 	1, 256;
	wgmma.fence.sync.aligned;
	@%p6 bra 	$L__BB0_4;
$L_list:
	.branchtargets
		$L__BB0_2,
		$L__BB0_4;
	brx.idx.uni 	%r1, $L_list;
$L__BB0_4:
$L__BB0_5:
	@%p7 trap;
	ret;

}
	.file	1 "/home/someone//kernel.py"
	.file	2 "lib.py", 1700000000, 99
	.section	.debug_abbrev
	{
.b8 1
$L__tmp0:
.b8 0 }
.pragma "last";
"""


def head(body: str, *, directives: str = "") -> str:
    """A module of one entry with ``body``; the body starts on line 5."""
    return f".version 9.0\n.target sm_90a\n.entry k(.param .u64 a) {directives}\n{{\n{body}\n}}\n"


def rendered(module: Module, kernel: Kernel) -> str:
    """``kernel`` in PTX: its unique names declared at the top, each instruction as its record prints it."""
    lines = [f".version {module.version[0]}.{module.version[1]}", f".target {module.target}"]
    lines += [
        f".{variable.space} .align {variable.align} .b8 {variable.name}[{variable.size}];"
        for variable in module.globals
    ]
    params = [f".param .align {p.align} .b8 {p.name}[{p.size}]" for p in kernel.params]
    lines += [f".entry {kernel.name}({', '.join(params)})", "{"]
    lines += [
        f".{variable.space} .align {variable.align} .b8 {variable.name}[{variable.size or 1}];"
        for variable in kernel.shared + kernel.local
    ]
    lines += [f".reg .{register.declared} {register.name};" for register in kernel.registers]
    for block in kernel.blocks:
        lines += [f"{name}:" for name, index in kernel.labels.items() if index == block.index]
        lines += [instruction.text for instruction in block.instructions]
    lists = kernel.branch_targets.items()
    lines += [f"{name}: .branchtargets {', '.join(labels)};" for name, labels in lists]
    return "\n".join([*lines, "}"])
