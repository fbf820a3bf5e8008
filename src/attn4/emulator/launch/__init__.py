"""What stands in for the CUDA runtime: host code of CuTe-DSL launches, and Python runs what it launched.

``relink`` makes a copy of an artefact that binds to ``shim`` and to nothing else; ``driver`` answers its
calls; ``image`` tells which PTX a loaded module is; ``tensors`` lends CPU memory as device memory;
``record`` is what comes out.
"""

from attn4.emulator.launch.device import device_attributes
from attn4.emulator.launch.driver import IN_PROCESS, Emulation, Modules, emulated_device, emulation
from attn4.emulator.launch.errors import LaunchError, ShimError
from attn4.emulator.launch.host import HostCode, load_host_code
from attn4.emulator.launch.record import Allocation, Launch, Run

__all__ = [
    "IN_PROCESS",
    "Allocation",
    "Emulation",
    "HostCode",
    "Launch",
    "LaunchError",
    "Modules",
    "Run",
    "ShimError",
    "device_attributes",
    "emulated_device",
    "emulation",
    "load_host_code",
]
