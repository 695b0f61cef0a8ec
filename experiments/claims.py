"""Claims of others about quantized drafts, tried on our pairs: `claims.md`.

`.venv/bin/python experiments/claims.py faults DRAFT QUANT OUT`: drafts as an engine would compute
them that reads an NVFP4 folder wrongly. QUANT is DRAFT by a recipe with NVFP4 weights in
compressed-tensors' layout. OUT gets one BF16 folder for each fault, which `draftquant replay DRAFT
OUT/* --traces T` measures.

`.venv/bin/python experiments/claims.py bounds REPLAYS CHANGE PROMPTS`: what the gate would say of a
change at a number of prompts. REPLAYS is what `draftquant replay DRAFT OTHER --traces T --json`
prints. Prompts are drawn from it 2,000 times: with both drafts on the same text, the other one's
tokens scaled to the change; and of the first draft alone, twice, as of runs on two texts.
"""

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draftquant.validate.counting.paired_change import change_of_sums
from safetensors.torch import load_file, save_file
from torch import Tensor

FILE = "model.safetensors"
_HALF = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat([_HALF, -_HALF])
BLOCK = 16
DRAWS = 2000
LIMIT = -0.01
"""Of the release policy."""
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)


class Folder:
    """The NVFP4 linears of a folder, read rightly or wrongly, and the largest weight of each."""

    def __init__(self, quant: Path, draft: Path) -> None:
        self.stored = load_file(quant / FILE)
        self.plain = load_file(draft / FILE)
        end = ".weight_packed"
        self.modules = [name.removesuffix(end) for name in self.stored if name.endswith(end)]
        self.largest = {
            m: float(self.plain[f"{m}.weight"].float().abs().max()) for m in self.modules
        }

    def of(self, module: str, part: str) -> Tensor:
        return self.stored[f"{module}.weight_{part}"].float()

    def value(
        self,
        module: str,
        *,
        swapped: bool = False,
        block: int = BLOCK,
        scales: Tensor | None = None,
    ) -> Tensor:
        """[out, in]; `swapped`: the second of two values comes first."""
        packed = self.stored[f"{module}.weight_packed"]
        halves = (packed & 15, packed >> 4)
        codes = torch.stack(halves[::-1] if swapped else halves, -1).flatten(1).long()
        scale = self.of(module, "scale") if scales is None else scales
        wide = scale.repeat_interleave(block, 1)[:, : codes.shape[1]]
        return E2M1[codes] * wide / self.of(module, "global_scale")

    def tiled(self, module: str) -> Tensor:
        """Scales in the order of a kernel, tiles of 128 rows by 4, read row by row."""
        scale = self.of(module, "scale")
        rows, columns = scale.shape
        padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 4) * 4)
        padded[:rows, :columns] = scale
        tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
        return tiles.permute(0, 3, 2, 1, 4).reshape(padded.shape)[:rows, :columns]

    def of_one(self, module: str) -> Tensor:
        """As if each linear had a global scale, and the fused one took the largest divisor."""
        stem, leaf = module.rpartition(".")[::2]
        group = next((group for group in _FUSED if leaf in group), (leaf,))
        parts = [f"{stem}.{each}" if stem else each for each in group]
        smallest = min(self.largest[each] for each in parts if each in self.largest)
        return self.value(module) * smallest / self.largest[module]


def faults(folder: Folder) -> Mapping[str, Callable[[str], Tensor]]:
    """Name -> the weight of a module under it."""

    def powers(m: str) -> Tensor:
        return torch.exp2(torch.log2(folder.of(m, "scale").clamp(min=2**-9)).round())

    return {
        "0-right": folder.value,
        "1-one-global-scale-for-fused-linears": folder.of_one,
        "2-scales-rounded-to-powers-of-two": lambda m: folder.value(m, scales=powers(m)),
        "3-scales-of-32-values": lambda m: folder.value(m, block=2 * BLOCK),
        "4-scales-in-the-kernels-order": lambda m: folder.value(m, scales=folder.tiled(m)),
        "5-global-scale-halved": lambda m: folder.value(m) / 2,
        "6-no-global-scale": lambda m: folder.value(m) * folder.of(m, "global_scale"),
        "7-nibbles-swapped": lambda m: folder.value(m, swapped=True),
    }


def write_faults(draft: Path, quant: Path, out: Path) -> None:
    """See the module."""
    folder = Folder(quant, draft)
    for name, weight in faults(folder).items():
        shutil.copytree(draft, out / name)
        wrong = {f"{m}.weight": weight(m).bfloat16().contiguous() for m in folder.modules}
        save_file({**folder.plain, **wrong}, out / name / FILE, metadata={"format": "pt"})


def _sums(replay: Mapping[str, Any]) -> Any:
    """[2, prompts] tokens and verify steps."""
    steps = np.array([prompt["histogram"] for prompt in replay["prompts"]], dtype=float)
    return np.stack([steps @ np.arange(1, steps.shape[1] + 1), steps.sum(1)])


def print_bounds(replays: Path, change: float, prompts: int) -> None:
    """See the module."""
    first, other = map(_sums, json.loads(replays.read_text(encoding="utf-8"))[:2])
    tokens, steps = first.sum(1) / other.sum(1)
    scaled = other * [[(1 + change) * tokens / steps], [1]]
    random = np.random.default_rng(0)
    for title in ("the same text", "texts of their own"):
        said, ends = Counter[str](), []
        for _ in range(DRAWS):
            drawn = random.integers(0, first.shape[1], prompts)
            ours, theirs = first[:, drawn], scaled[:, drawn]
            if title != "the same text":
                again = random.integers(0, first.shape[1], prompts)
                theirs = first[:, again] * [[1 + change], [1]]
            found = change_of_sums(*ours, *theirs, confidence=0.95)
            lower, upper = found.relative_bounds
            said["PASS" if lower > LIMIT else "FAIL" if upper < LIMIT else "INCONCLUSIVE"] += 1
            ends.append((lower, upper))
        shares = ", ".join(f"{name} {count / DRAWS:.0%}" for name, count in said.most_common())
        low, high = np.median(ends, axis=0)
        print(f"{change:+.1%}, {prompts} prompts, {title}: {shares} ({low:+.1%}, {high:+.1%})")


if __name__ == "__main__":
    if sys.argv[1] == "faults":
        write_faults(*map(Path, sys.argv[2:5]))
    else:
        print_bounds(Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
