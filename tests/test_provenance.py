"""draftquant.json: its five kinds, byte for byte, and what is wrong in one."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.files.provenance import (
    CutProvenance,
    DequantizedProvenance,
    QuantizedProvenance,
    TranscodedProvenance,
)
from draftquant.quantize.files.provenance_file import read_provenance
from draftquant.quantize.files.publish import write_provenance
from draftquant.recipes.errors import CheckpointError

RECIPE = """{"schema_version": 1, "name": "mine", "summary": "a test",
  "loads_on": [{"engine": "vllm", "arch": ["sm90"], "family": ["dflash"]}],
  "backend": "torch", "layout": "modelopt",
  "weights": {"dtype": "fp8_e4m3", "granularity": "tensor", "symmetric": true},
  "activations": {"dtype": "fp8_e4m3", "granularity": "tensor", "dynamic": false},
  "algorithm": {"scale": "absmax", "rounding": "nearest"},
  "rules": [{"role": ["attention", "mlp"], "action": "quantize"},
    {"role": ["norm"], "action": "keep", "why": "small"},
    {"tensor": ["fc.*"], "action": "keep", "why": "caf\\u00e9", "optional": true}],
  "expect": {"quantized_per_layer": 7}, "gate": {"policy": "screening"}}"""
MADE_BY = '{"draftquant": "0.1.0", "argv": ["draftquant", "quantize"]}'
QUANTIZED = f"""{{"format": "draftquant-provenance", "version": 1, "draftquant": "0.1.0",
  "backend_versions": {{"torch": "2.9", "amd-quark": "0.13"}},
  "argv": ["draftquant", "quantize", "caf\\u00e9"],
  "source": {{"hub_id": null, "revision": null, "family": "eagle3-llama",
    "tensor_digests": {{"fc.weight": "00", "norm.weight": "11"}}}},
  "recipe": {RECIPE},
  "recipe_sha256": "80c0fc0bf476fe0a0c65e210f4675c45e48ea2c60f1081ab9b78c3e2bae4ead1",
  "tensor_digests": {{"norm.weight": "11", "fc.weight": "00"}},
  "tensor_bytes": {{"before": 10, "after": 5}}}}"""
OPTIONAL = f"""{{
  "config_changes": {{"rope_theta": 1e6, "eagle_config.layers": [1, null, {{"a": true}}]}},
  "balanced": {{"midlayer.input_layernorm.weight": -4}},
  "input_scales": {{"a.q_proj": 0.25, "a.k_proj": 1}}, "input_scale_origin": null,
  "made_by": {MADE_BY}}}"""
TRANSCODED = """{"format": "draftquant-transcoded", "version": 1, "draftquant": "0.1.0", "argv": [],
  "source": {"hub_id": "owner/name", "revision": "abc"},
  "tensor_digests": {"norm.weight": "11"},
  "transcoded_from": {"hub_id": "owner/name", "revision": "abc", "layout": "awq",
    "weights": {"dtype": "int4", "granularity": "group", "symmetric": true, "group_size": 128},
    "scale_dtype": "F16", "tensor_digests": {"norm.weight": "00"}}}"""
DEQUANTIZED = """{"format": "draftquant-dequantized", "version": 1, "draftquant": "0.1.0",
  "argv": [],
  "source": {"hub_id": null, "revision": null, "family": "eagle3-mla",
    "scheme": "awq int4 per group of 128", "tensor_digests": {"norm.weight": "00"}},
  "dtype": "BF16",
  "rounding": {"elements": 100, "rounded": 3, "max_relative_difference": 0.00390625},
  "tensor_digests": {"norm.weight": "11"}, "tensor_bytes": {"before": 10, "after": 20},
  "quantized_by": null}"""
CUT = """{"format": "draftquant-cut", "version": 1, "draftquant": "0.1.0",
  "argv": ["draftquant", "vocab"],
  "cuts": [{
      "source": {"hub_id": null, "revision": null, "family": "eagle3-llama",
        "tensor_digests": {"lm_head.weight": "00"}},
      "choice": {"method": "frequency", "traces_sha256": "44", "size": 5,
        "coverage_reached": 0.5, "calibration_prompts": []},
      "vocabulary": 20, "size_before": 10, "size": 5, "convention": "offsets", "missing": 1,
      "head_from": {"tensor": "lm_head.weight", "digest": "77"}}],
  "tensor_digests": {"lm_head.weight": "11"}, "tensor_bytes": {"before": 10, "after": 5}}"""


def document(kind: str) -> dict[str, Any]:
    """A file of one kind; "whole" is a quantized one with every key."""
    quantized = json.loads(QUANTIZED)
    found: dict[str, dict[str, Any]] = {
        "quantized": quantized,
        "whole": quantized | json.loads(OPTIONAL),
        "transcoded": json.loads(TRANSCODED),
        "dequantized": json.loads(DEQUANTIZED),
        "cut": json.loads(CUT),
    }
    found["quantized-of-cut"] = quantized | {"cuts": found["cut"]["cuts"]}
    found["cut-of-quantized"] = found["cut"] | {"quantized_by": found["whole"]}
    found["cut-of-quantized"]["cuts"] = [
        each | {"source": each["source"] | {"tensor_digests": quantized["tensor_digests"]}}
        for each in found["cut"]["cuts"]
    ] + found["cut"]["cuts"]
    found["dequantized-of-cut"] = found["dequantized"] | {"quantized_by": found["cut-of-quantized"]}
    found["dequantized-of-ours"] = found["dequantized"] | {"quantized_by": found["whole"]}
    return found[kind]


def stored(folder: Path, content: object) -> Path:
    (folder / "draftquant.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return folder


KINDS = {
    "whole": QuantizedProvenance,
    "transcoded": TranscodedProvenance,
    "dequantized-of-ours": DequantizedProvenance,
    "cut": CutProvenance,
    "quantized-of-cut": QuantizedProvenance,
    "dequantized-of-cut": DequantizedProvenance,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_written_again_byte_for_byte(kind: str, tmp_path: Path) -> None:
    content = document(kind)
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
    before = (stored(tmp_path, content) / "draftquant.json").read_bytes()
    found = read_provenance(tmp_path)
    assert type(found) is KINDS[kind]
    (tmp_path / "draftquant.json").unlink()
    write_provenance(tmp_path, found)
    assert (tmp_path / "draftquant.json").read_bytes() == before


Edit = Callable[[dict[str, Any]], object]
FAULTS: dict[str, tuple[str, Edit]] = {
    "other format": ("quantized", lambda d: d.update(format="zip")),
    "unknown key": ("whole", lambda d: d.update(note=1)),
    "missing key": ("whole", lambda d: d.pop("tensor_bytes")),
    "hash": ("quantized", lambda d: d["source"]["tensor_digests"].update({"norm.weight": 1})),
    "NaN": ("whole", lambda d: d["input_scales"].update({"a.q_proj": float("nan")})),
    "scales of nowhere": ("whole", lambda d: d.pop("input_scale_origin")),
    "another recipe": ("quantized", lambda d: d["recipe"].update(name="other")),
    "a cut of nothing": ("cut", lambda d: d.update(cuts=[])),
    "a cut that grows": ("cut", lambda d: d["cuts"][0].update(size=11)),
    "percent": ("cut", lambda d: d["cuts"][0]["choice"].update(coverage_reached=98)),
    "neither size nor coverage": ("cut", lambda d: d["cuts"][0]["choice"].pop("size")),
    "cut of another folder": ("cut", lambda d: d.update(quantized_by=document("whole"))),
    "made by a dequantized one": (
        "dequantized", lambda d: d.update(quantized_by=document("dequantized"))),
    "fault of what it was made by": (
        "dequantized-of-ours", lambda d: d["quantized_by"]["source"].pop("family")),
}  # fmt: skip
"""What is said of each is kept in told/provenance.txt."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_key(name: str, tmp_path: Path) -> None:
    kind, edit = FAULTS[name]
    content = document(kind)
    edit(content)
    with pytest.raises(CheckpointError) as caught:
        read_provenance(stored(tmp_path, content))
    assert caught.value.where == str(tmp_path / "draftquant.json")


def test_a_file_that_is_no_record(tmp_path: Path) -> None:
    long = b'{"version": ' + b"9" * 5000 + b"}"
    for content in (b"[]", b'{"format": 1, "format": 1}', b"[" * 100_000, long, b"\xff"):
        (tmp_path / "draftquant.json").write_bytes(content)
        with pytest.raises(CheckpointError):
            read_provenance(tmp_path)
