"""Registers move between warpgroups (setmaxnreg)."""

from __future__ import annotations

import cutlass.cute as cute

OF_AN_SM = 65536


def reallocate(plan, role):
    """Take or give back registers until this warpgroup has those of ``role``; by all of its warps."""
    launched = OF_AN_SM // plan.threads // 8 * 8
    if role.registers > launched:
        cute.arch.setmaxregister_increase(role.registers)
    else:
        cute.arch.setmaxregister_decrease(role.registers)
