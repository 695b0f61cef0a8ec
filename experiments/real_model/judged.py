"""What is recorded with the target, which quantized drafts are judged on it, and the cut heads."""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drafts import DRAFTS
from judging import Case, Recording, of_recipe

SIZES = (4096, 8192, 16_384, 32_768, 65_536, 131_072)
"""Of the curve."""
RECORDINGS = {
    "gate": Recording(prompts="gate", count=300),
    "calibration-16": Recording(prompts="calibration", count=16),
    "calibration-64": Recording(prompts="calibration", count=64),
    "calibration-256": Recording(prompts="calibration", count=256),
    "calibration-code": Recording(prompts="calibration", count=64, category="code"),
    "calibration-lists": Recording(prompts="calibration", count=64, category="lists"),
    "sampled-0.7": Recording(prompts="gate", count=300, options=("--temperature", "0.7")),
    "sampled-1": Recording(prompts="gate", count=300, options=("--temperature", "1")),
    "long-2048": Recording(prompts="long-2048", count=30),
    "long-8192": Recording(prompts="long-8192", count=8),
}

_RECIPES = (
    "fp8-ptpc", "mi325x-fp8", "int4-channel", "int4-group128", "mi325x-w4a8", "mxfp4-weights",
    "nvfp4-weights", "mi355-mxfp4", "blackwell-fp8", "int4-channel-gptq", "int4-group128-gptq",
    "mi325x-w4a8-gptq", "mxfp4-weights-gptq", "nvfp4-weights-gptq", "blackwell-nvfp4",
)  # fmt: skip


def _cases() -> Iterator[Case]:
    for name in _RECIPES:
        yield of_recipe("recipes", name)
    for seen in ("16", "64", "256", "code", "lists"):
        for name in ("int4-channel-gptq", "int4-group128-gptq"):
            yield of_recipe("calibration", name, f"calibration-{seen}")
        yield of_recipe("input scales", "blackwell-fp8", f"calibration-{seen}")
    yield Case(
        question="input scales", quantize=("--recipe", "blackwell-fp8", "--input-scale", "1")
    )
    for scales in ("unit", "absmax", "measured"):
        yield Case(
            question="KV cache",
            quantize=("--recipe", "fp8-ptpc", "--kv-cache", scales),
            calibrated_on="" if scales == "unit" else "calibration-64",
        )
    for name in ("fp8-ptpc-head", "int4-channel-gptq-head", "int4-group128-gptq-head"):
        yield of_recipe("head", name)
    for heat in ("0.7", "1"):
        for how in ("greedy", "probabilistic"):
            for name in ("fp8-ptpc", "int4-channel-gptq"):
                gate = ("--draft-sampling", how)
                yield of_recipe("sampled", name, judged_on=f"sampled-{heat}", gate=gate)
    for length in ("2048", "8192"):
        for name in ("fp8-ptpc", "int4-channel", "int4-channel-gptq"):
            yield of_recipe("long texts", name, judged_on=f"long-{length}")
    for name in ("fp8-ptpc", "int4-channel-gptq"):
        yield of_recipe("other drafts", name, draft="eagle3-whole")
    for draft in ("mla", "dflash"):
        for name in ("fp8-ptpc", "int4-channel", "int4-channel-gptq", "mxfp4-weights-gptq"):
            yield of_recipe("other drafts", name, draft=draft)


CASES = tuple(_cases())
DEPTHS = {
    name: trained.num_draft_tokens
    for base, trained in DRAFTS.items()
    for name in (base, f"{base}-whole")
}
"""K of each draft."""


def curve(work: Path, draft: str, target: Path, traces: Path) -> list[dict[str, Any]]:
    """Acceptance by the number of rows, chosen by calibration text, with and without counts.

    A row is a size, a scope and an order: shares are fractions, bounds hold together. "off-domain"
    = rows that the prompts of the other categories choose.
    """
    found = []
    for name, counted in (("prompts", ()), ("counts", ("--counts", work / "counts.json"))):
        command = (
            sys.executable, "-m", "draftquant", "vocab", work / draft / "draft", "--curve",
            "--traces", traces / "calibration-256", "--judge", traces / "gate", "--target", target,
            "--sizes", ",".join(map(str, SIZES)), "--json", "--plot", work / f"curve-{name}.svg",
            *counted,
        )  # fmt: skip
        done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, check=True)
        (work / f"curve-{name}.json").write_bytes(done.stdout)
        curves = json.loads(done.stdout)["curve"]
        for chosen in ("chosen", "off_domain"):
            rows = itertools.chain(curves[chosen]["whole"], *curves[chosen]["categories"])
            found += [
                {
                    "rows chosen by": name,
                    "off-domain": chosen == "off_domain",
                    **{key: row[key] for key in ("size", "scope", "coverage")},
                    "change": round(row["relative_change"], 5),
                    "bounds": [round(row["lower"], 5), round(row["upper"], 5)],
                }
                for row in rows
            ]
    return found
