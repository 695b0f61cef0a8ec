"""Makes every x86-64 compute the same bits: imported before numpy and torch, which read this once.

Torch, MKL, oneDNN, OpenBLAS and numpy choose their kernels by the CPU, and kernels differ in last
digits. They are told to compute as on an old one, on one thread.
"""

import os

ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    "OMP_NUM_THREADS": "1",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OPENBLAS_CORETYPE": "Prescott",
    "OPENBLAS_NUM_THREADS": "1",
}
os.environ.update(ENVIRONMENT)


def probe() -> str:
    """A digest of what this machine makes of fixed numbers: products, factors, exponentials."""
    import hashlib

    import numpy as np
    import torch
    from scipy import stats

    draw = np.random.Generator(np.random.PCG64(0)).integers(-999, 1000, (2, 96, 96))
    left, right = (torch.from_numpy(part / 1000) for part in draw)
    found = [
        (left.float() @ right.float()).numpy(),
        (left.bfloat16() @ right.bfloat16()).float().numpy(),
        torch.linalg.cholesky(left @ left.T + torch.eye(96, dtype=torch.float64)).numpy(),
        torch.softmax(left.float(), dim=1).numpy(),
        np.exp(draw[0] / 1000),
        np.linalg.inv(draw[1] / 1000),
        stats.t.ppf(np.linspace(0.9, 0.99, 10), 7.5),
    ]
    return hashlib.sha256(b"".join(part.tobytes() for part in found)).hexdigest()
