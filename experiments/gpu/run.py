"""Everything that runs on a GPU, beside the CPU. `experiments/run gpu`.

A part that fails costs only its own rows. Exit status: 0 all is as it must be; 1 something is not,
or a part failed; 2 there is no such device.
"""

import argparse
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]

import torch  # noqa: E402
from draftquant.calibration.passes.devices import resolve_device  # noqa: E402
from draftquant.recipes.errors import DeviceError  # noqa: E402
from gpu.rows import Row, Run, markdown  # noqa: E402
from gpu.same import encoders, verbs  # noqa: E402

RESULTS = "RESULTS.md"
PARTS = {"encoders": encoders, "verbs": verbs}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = argparse.ArgumentParser(prog="experiments/run gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:I, or cpu to try the code")
    parser.add_argument("--tiny", action="store_true", help="shapes for a CPU")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=HERE, help=f"folder for {RESULTS}")
    asked = parser.parse_args(arguments)
    try:
        device = resolve_device(asked.device)
    except DeviceError as exc:
        print(f"no CUDA device: nothing was run ({exc})", file=sys.stderr)
        return 2
    asked.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for name in asked.only:
        started, problem = time.monotonic(), None
        with tempfile.TemporaryDirectory(prefix="draftquant-gpu-") as work:
            try:
                for row in PARTS[name](Run(device=device, tiny=asked.tiny, work=Path(work))):
                    rows.append(row)
            except Exception as exc:  # noqa: BLE001
                traceback.print_exc()
                problem = f"failed: {type(exc).__name__}: {exc}".replace("|", "/")
        took = f"{time.monotonic() - started:.0f}"
        cells = {"part": name, "seconds": took, "ended": problem or "well"}
        rows.append(Row(table="Parts of this run", cells=cells, ok=problem is None))
    text = _heading(device) + markdown(rows)
    (asked.out / RESULTS).write_text(text, encoding="utf-8")
    print(text)
    return 1 if any(row.ok is False for row in rows) else 0


def _heading(device: torch.device) -> str:
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return (
        "# What a GPU computes\n\nWritten by `experiments/run gpu`. Device:"
        f" {name}. PyTorch {torch.__version__}, Python {platform.python_version()}.\n\n"
    )


if __name__ == "__main__":
    sys.exit(main())
