"""Special registers, PTX ISA section 10, and their types."""

from __future__ import annotations

from attn4.emulator.ptx.module import SpecialRegister

_VECTORS = ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
_LANES = ("lanemask_eq", "lanemask_le", "lanemask_lt", "lanemask_ge", "lanemask_gt")
_SHARED = ("total_smem_size", "aggr_smem_size", "dynamic_smem_size")
_RESERVED = tuple(f"reserved_smem_offset_{end}" for end in ("begin", "end", "cap", "0", "1"))
_CLOCKS = ("clock", "clock_hi", "globaltimer_lo", "globaltimer_hi")
_UNITS = ("laneid", "warpid", "nwarpid", "smid", "nsmid", "cluster_ctarank", "cluster_nctarank")
_B32 = _UNITS + _LANES + _CLOCKS + _SHARED + _RESERVED
_B64 = ("gridid", "clock64", "globaltimer", "current_graph_exec")


def _table() -> dict[str, SpecialRegister]:
    types = {f"%{name}.{axis}": "b32" for name in _VECTORS for axis in "xyz"}
    types |= {f"%{name}": "b32" for name in _B32}
    types |= {f"%envreg{i}": "b32" for i in range(32)}
    types |= {f"%{name}": "b64" for name in _B64}
    types["%is_explicit_cluster"] = "pred"
    return {name: SpecialRegister(name, type_) for name, type_ in types.items()}


SPECIAL_REGISTERS = _table()
