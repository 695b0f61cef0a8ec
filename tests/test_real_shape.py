"""The generated draft of real size: small ones byte for byte, the full one by its headers alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from draftquant.quantize.checkpoint import Checkpoint
from draftquant.quantize.drafts import Draft, read_draft
from draftquant.quantize.errors import OutputError
from draftquant.quantize.plan import make_plan
from draftquant.recipes import load_recipe
from draftquant.scripts.real_shape import (
    DIVISORS,
    main,
    real_shape_config,
    real_shape_tensors,
    write_real_shape_draft,
)
from safetensors.torch import load_file

BF16_BYTES = 6_356_525_056  # reference: 3,178,262,528 parameters
QUANTIZED_PARAMETERS = 675_282_944
QUANTIZED_ROWS = 3 * 8192 + 7168 + 2 * 12288 + 7168
KEPT_BYTES = BF16_BYTES - 2 * QUANTIZED_PARAMETERS


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real_shape") / "draft"
    write_real_shape_draft(folder, divide=32)
    return folder


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Draft:
    """The full-size draft as a sparse file: real headers, no data."""
    folder = tmp_path_factory.mktemp("full_size")
    config = real_shape_config()
    header: dict[str, object] = {}
    end = 0
    for tensor in real_shape_tensors(config):
        entry = {"dtype": tensor.dtype, "shape": list(tensor.shape)}
        header[tensor.name] = {**entry, "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(config))
    return read_draft(Checkpoint.open(folder))


def test_every_divisor_gives_a_config_that_its_tensors_fit(tmp_path: Path) -> None:
    for divide in DIVISORS:
        tensors = {t.name: t.shape for t in real_shape_tensors(real_shape_config(divide))}
        assert len(tensors) == 14
        assert tensors["embed_tokens.weight"] == (163840 // divide, 7168 // divide)
        assert tensors["midlayer.self_attn.q_proj.weight"] == (8192 // divide, 14336 // divide)
    with pytest.raises(ValueError, match="divide: expected one of"):
        write_real_shape_draft(tmp_path / "draft", divide=3)


def test_a_small_draft_is_read_as_eagle3_llama(small: Path) -> None:
    draft = read_draft(Checkpoint.open(small))
    assert draft.family.name == "eagle3-llama"
    assert draft.checkpoint.nbytes == 2 * sum(row.tensor.numel for row in draft.rows)
    assert {row.tensor.dtype for row in draft.rows} == {"BF16"}
    assert draft.checkpoint.headers["model.safetensors"].metadata == {"format": "pt"}


def test_weights_look_like_weights(small: Path) -> None:
    for name, weight in load_file(small / "model.safetensors").items():
        values = weight.float()
        assert values.isfinite().all(), name
        if values.ndim == 1:
            assert values.mean() == pytest.approx(1, abs=0.02), name
            continue
        assert values.std() == pytest.approx(0.02, rel=0.02), name
        assert values.abs().amax(dim=1).min() > 0, name
        assert len(values.unique(dim=0)) == len(values), name


def test_equal_arguments_give_equal_bytes(small: Path, tmp_path: Path) -> None:
    write_real_shape_draft(tmp_path / "again", divide=32)
    write_real_shape_draft(tmp_path / "other", divide=32, seed=1)
    first, again, other = (
        (folder / "model.safetensors").read_bytes()
        for folder in (small, tmp_path / "again", tmp_path / "other")
    )
    assert first == again
    assert first != other


def test_scale_multiplies_the_linears_and_leaves_the_norms(small: Path, tmp_path: Path) -> None:
    write_real_shape_draft(tmp_path / "wide", divide=32, scale=4.0)
    before = load_file(small / "model.safetensors")
    for name, weight in load_file(tmp_path / "wide" / "model.safetensors").items():
        factor = 1 if weight.ndim == 1 else 4
        assert torch.equal(weight, before[name] * factor), name  # a power of two is exact


def test_an_existing_output_is_refused(
    small: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(OutputError, match="already exists"):
        write_real_shape_draft(small)
    assert main([str(small), "--divide", "64"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main([str(tmp_path / "draft"), "--divide", "64"]) == 0


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """A draft of 100 MB takes no more memory than a tiny one (ru_maxrss counts kilobytes)."""
    script = (
        "import resource, sys; from draftquant.scripts.real_shape import main;"
        "main(sys.argv[1:]); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for divide in ("64", "8"):
        out = str(tmp_path / divide)
        command = (sys.executable, "-c", script, out, "--divide", divide)
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        peaks.append(int(run.stdout.split()[-1]))
    assert peaks[1] - peaks[0] < 32 * 1024


def test_the_full_size_is_that_of_the_published_draft(full: Draft) -> None:
    assert len(full.rows) == 14
    assert full.checkpoint.nbytes == BF16_BYTES
    assert sum(row.tensor.numel for row in full.rows) == 3_178_262_528


@pytest.mark.parametrize(
    ("recipe", "total", "overhead"),
    [
        (
            "mi325x-w4a8",
            5_343_759_360,
            {"weight_scale": 2 * QUANTIZED_ROWS, "weight_zero_point": 4 * QUANTIZED_ROWS // 8},
        ),
        (
            "int4-channel",
            5_343_727_728,
            {"weight_scale": 2 * QUANTIZED_ROWS, "weight_shape": 7 * 2 * 8},
        ),
        ("fp8-ptpc", 5_681_496_064, {"weight_scale": 4 * QUANTIZED_ROWS}),
        ("blackwell-fp8", 5_681_242_168, {"weight_scale": 7 * 4, "input_scale": 7 * 4}),
    ],
)
def test_the_byte_budget_of_every_recipe(
    full: Draft, recipe: str, total: int, overhead: dict[str, int]
) -> None:
    plan = make_plan(load_recipe(recipe), full)
    bits = 4 if plan.recipe.weights.dtype == "int4" else 8
    assert plan.bytes_before == BF16_BYTES
    assert plan.overhead() == overhead
    assert plan.bytes_after == total
    assert total == KEPT_BYTES + QUANTIZED_PARAMETERS * bits // 8 + sum(overhead.values())
