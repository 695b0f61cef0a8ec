"""Folders whose linears have several formats: written, declared, verified, decoded, replayed."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from by_recipe import planned, quantized
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils import is_match
from draftquant.quantize.backends import get_backend
from draftquant.quantize.drafts.engine_traits import fused_group
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.planning.quantization_plan import Plan
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.stored.stored_draft import StoredDraft
from draftquant.quantize.verify.audit import audit_checkpoint
from draftquant.quantize.verify.verification import verify
from draftquant.recipes.errors import VerifyError
from mixes import MIXES
from tiny import read_tensors, tiny_eagle3_llama
from tiny_dflash import tiny_dflash
from tiny_mla import tiny_eagle3_mla
from verify_cases import edit, edit_declaration, faults_of, flip_bit, reseal
from wide import WIDE

pytestmark = pytest.mark.slow

BUILDERS = {"eagle3-llama": tiny_eagle3_llama, "eagle3-mla": tiny_eagle3_mla, "dflash": tiny_dflash}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {name: make(folder / name, **WIDE[name]) for name, make in BUILDERS.items()}


@pytest.fixture(scope="module")
def folder(sources: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mixed") / "out"
    quantized(sources["eagle3-llama"], MIXES["nvfp4-static-fp8-down"], out, scale=0.01)
    return out


def computed(plan: Plan, source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Codes times scales of every linear as its own format gives them, by on-disk module name."""
    tensors = read_tensors(source)
    steps = {step.row.module: step for step in plan.quantized}
    raw = {
        module: torch.frombuffer(bytearray(tensors[f"{module}.weight"].data), dtype=torch.bfloat16)
        .view(step.row.tensor.shape)
        for module, step in steps.items()
    }  # fmt: skip
    for module, step in steps.items():
        weights = plan.format_of(step).weights
        fused = [raw[m] for m, s in steps.items() if fused_of(s) == fused_of(step)]
        absmax = torch.tensor([[max(float(w.float().abs().max()) for w in fused)]])
        whole = absmax if weights.scales_whole_matrix else None
        yield module, get_backend("torch").quantize(raw[module], weights, whole).dequantized()


def fused_of(step: Any) -> tuple[str, str]:
    return fused_group(step.row.canonical.removesuffix(".weight"))


@pytest.mark.some(6)
@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("family", BUILDERS)
def test_every_linear_is_stored_in_its_own_format(
    family: str, name: str, sources: Mapping[str, Path], tmp_path: Path
) -> None:
    source, out = sources[family], tmp_path / "out"
    plan = quantized(source, MIXES[name], out, scale=0.01).plan
    forms = {str(plan.format_of(step)) for step in plan.quantized}
    assert len(forms) == len(MIXES[name].formats)

    report = verify(out, source)
    assert report.ok, report.faults
    assert audit_checkpoint(Checkpoint.open(out)).faults == ()

    stored = StoredDraft.read(Checkpoint.open(out))
    rows = {row.module: row for row in stored.draft.rows}
    for module, expected in computed(plan, source):
        decoded = torch.from_numpy(stored.linear(rows[module]).decoded().dequantized())
        # The inverse of NVFP4's global scale is stored: two roundings of 2^-24.
        rtol = 2**-22 if stored.checkpoint.tensors.get(f"{module}.weight_global_scale") else 0
        torch.testing.assert_close(decoded, expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("name", MIXES)
def test_compressed_tensors_reads_the_same_format_for_every_linear(
    name: str, sources: Mapping[str, Path]
) -> None:
    """Its own classes, and its own rule of which target means a module."""
    plan = planned(sources["eagle3-llama"], MIXES[name])
    config = QuantizationConfig.model_validate(plan.declared())
    assert config.format == "mixed-precision"
    linear = torch.nn.Linear(1, 1)
    for step in plan.quantized:
        by_name = [s for s in config.config_groups.values() if s.targets != ["Linear"]]
        found = [s for s in by_name if is_match(step.row.module, linear, s.targets)]
        (scheme,) = found or [s for s in config.config_groups.values() if s.targets == ["Linear"]]
        weights = plan.format_of(step).weights
        assert scheme.weights is not None
        bits = {"fp8_e4m3": 8}.get(weights.dtype, 4)
        assert (scheme.weights.num_bits, scheme.weights.group_size) == (bits, weights.group_size)
        assert (scheme.input_activations is None) == (plan.format_of(step).activations is None)


@pytest.mark.parametrize("module", ["midlayer.mlp.down_proj", "midlayer.self_attn.q_proj"])
def test_one_flipped_bit_is_found_whatever_the_format(
    module: str, folder: Path, sources: Mapping[str, Path], tmp_path: Path
) -> None:
    out = copied(folder, tmp_path)
    suffix = "weight" if "down" in module else "weight_packed"
    edit(out, lambda tensors: flip(tensors, f"{module}.{suffix}"))
    reseal(out)
    report = verify(out, sources["eagle3-llama"])
    name = f"{module}.{suffix}"
    assert f"{name}: expected" in faults_of(report)
    wrong = {fault.where for fault in report.faults if "proj" in fault.where}
    assert wrong == {name, f"draftquant.json: tensor_digests.{name}"}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("config_groups.group_1.format", None, "group_1.format: understood are 'pack-quantized'"),
        (
            "config_groups.group_1.format",
            "dense",
            "group_1.format: understood are 'pack-quantized'",
        ),
        ("config_groups.group_1.targets", [], "group_1.targets: understood is a list of names"),
        ("config_groups.group_1.targets", "Linear", "group_1.targets: understood is a list"),
        ("config_groups.group_1.targets", ["re:.*(down"], "understood is a regular expression"),
        ("config_groups.group_1.weights.num_bits", 4, "group_1.weights.num_bits: understood is 8"),
        ("config_groups.group_1.strange", 1, r"group_1.strange \(unknown key\)"),
        ("config_groups.group_2", 1, "group_2: understood is a JSON object"),
        ("config_groups", {}, "config_groups: understood is 1 to 16 groups"),
        ("config_groups", {f"g{i}": {} for i in range(17)}, "understood is 1 to 16 groups"),
    ],
)
def test_groups_that_are_not_understood_are_refused(
    path: str, value: object, message: str, folder: Path, tmp_path: Path
) -> None:
    out = copied(folder, tmp_path)

    def change(declared: dict[str, Any]) -> None:
        *parents, key = path.split(".")
        for parent in parents:
            declared = declared[parent]
        declared[key] = value

    edit_declaration(out, change)
    with pytest.raises(VerifyError, match=message):
        load_draft(out)


def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def flip(tensors: dict[str, Any], name: str) -> None:
    tensors[name] = flip_bit(tensors[name], 3)
