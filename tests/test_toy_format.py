"""A number format more, added the way a developer would: what it takes is seven product files.

The edits are made in a copy of the packages, which then quantizes, verifies and dequantizes.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DRAFT = ROOT / "tests" / "pairs" / "eagle3-llama" / "draft"
PACKAGES = ("recipes", "quantize", "calibration", "validate", "scripts")
MOST_FILES = 7
EDITS = {
    "recipes/formats.py": [
        ('WeightDtype = Literal["int4",', 'WeightDtype = Literal["toy4", "int4",'),
        ("NumberFormat] = {\n", "NumberFormat] = {\n"
         '    "toy4": NumberFormat(\n'
         '        bits=4, kind="float", largest=6, sizes={"group": (32,)}, stored_dtype="U8",\n'
         '        codes_per_element=2, scale_dtype="F32"),\n'),
    ],
    "quantize/numerics/number_formats.py": [
        (
            "    return mxfp4_scale(rows) if whole is None else nvfp4_scale(rows, whole)\n",
            "    if number.powers_of_two or number.global_scale:\n"
            "        return mxfp4_scale(rows) if whole is None else nvfp4_scale(rows, whole)\n"
            "    scale = row_absmax(rows).float() / number.largest\n"
            "    return torch.where(scale > 0, scale, 1.0)\n",
        ),
    ],
    "quantize/verify/scales.py": [
        (
            "    if scheme.number.is_fp8:\n        scale = largest / np.float32(E4M3_MAX)\n",
            "    if not scheme.number.is_integer:\n"
            "        scale = largest / np.float32(scheme.number.largest)\n",
        ),
    ],
    "quantize/layouts/layout.toml": [
        ('    "mxfp4 per group with none",\n', '    "mxfp4 per group with none",\n'
         '    "toy4 per group with none",\n'),
    ],
    "quantize/stored/layouts/stored_compressed_tensors.py": [
        ("] = {\n    \"pack-quantized\"", "] = {\n    \"toy4-pack-quantized\": \"toy4\",\n"
         "    \"pack-quantized\""),
    ],
    "quantize/engines/schemes.toml": [
        ("\n# The MLA draft of SGLang", "".join(
            f'\n[[row]]\nengine = "{engine}"\nclass = "CompressedTensors"\nrefused = "no-ct"\n'
            'schemes = ["compressed-tensors toy4 none"]\n'
            for engine in ("vllm", "sglang")
        ) + "\n# The MLA draft of SGLang"),
    ],
}  # fmt: skip
"""Product file -> texts, each of which stands in it once, and what stands there instead."""
RECIPE = "recipes/toy4.yaml"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder from which `draftquant` is imported, with the toy format."""
    home = tmp_path_factory.mktemp("toy")
    installed = home / "draftquant"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, installed / package)  # what is compiled too
    for module in (ROOT / "scripts" / "draftquant").glob("*.py"):
        shutil.copy(module, installed / module.name)
    for name, edits in EDITS.items():
        text = (installed / name).read_text(encoding="utf-8")
        for old, new in edits:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        (installed / name).write_text(text, encoding="utf-8")
    recipe = (ROOT / "recipes" / "mi355-mxfp4.yaml").read_text(encoding="utf-8")
    kept = recipe[recipe.index("rules:") :]
    (installed / RECIPE).write_text(
        "schema_version: 1\nname: toy4\nsummary: FP4 in groups of 32 under float32 scales\n"
        "backend: torch\nlayout: compressed-tensors\nactivations: null\n"
        "weights: {dtype: toy4, granularity: group, group_size: 32, symmetric: true}\n"
        f"algorithm: {{scale: absmax, rounding: nearest}}\n{kept}",
        encoding="utf-8",
    )
    return home


SCRIPT = """
import sys
from draftquant.scripts.cli import main
from tiny import Stored, read_tensors, write_tensors
draft, = sys.argv[1:]
codes = [main(["quantize", draft, "--recipe", "toy4", "--out", "out"])]
codes += [main(["verify", "out", "--against", draft])]
codes += [main(["dequantize", "out", "--out", "plain"])]
main(["check", "out", "--engine", "vllm", "--gpu", "sm90"])
tensors = read_tensors(Path("out"))
name = next(name for name in tensors if name.endswith("q_proj.weight_scale"))
dtype, shape, scales = tensors[name]
write_tensors(Path("out"), {**tensors, name: Stored(dtype, shape, scales[4:8] + scales[4:])})
print(codes, main(["verify", "out", "--against", draft]))
"""


@pytest.mark.slow
def test_it_takes_few_product_files_and_is_verified_by_the_other_side(packages: Path) -> None:
    assert len({*EDITS, RECIPE}) <= MOST_FILES
    paths = os.pathsep.join((str(packages), str(ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-c", f"from pathlib import Path{SCRIPT}", str(DRAFT)],
        env={"PYTHONPATH": paths, "PATH": "", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
        cwd=packages,
        capture_output=True,
        text=True,
        check=True,
    )
    said = done.stdout + done.stderr
    assert "[0, 0, 0] 1" in said
    assert "scales, exactly the nearest quantized values" in said
    assert "7 linears dequantized" in said
    assert "No compressed-tensors compatible scheme was found" in said
    assert "expected absmax / 6" in said
