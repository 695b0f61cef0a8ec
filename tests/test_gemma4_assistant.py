"""Gemma 4's assistant: roles, what is made of it, what vLLM's class did with it, and no replay."""

import itertools
import json
from pathlib import Path
from typing import Any

import draftquant.api as dq
import numpy as np
import pytest
from draftquant.quantize.drafts.families.gemma4_assistant import FAMILY
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes.errors import DraftQuantError
from tiny import Stored, store, write_tensors

pytestmark = pytest.mark.usefixtures("one_thread")

ROW = json.loads((Path(__file__).parent / "gemma4_assistant.json").read_text("utf-8"))
"""config.json, and dtypes and shapes of tensors, of a folder that vLLM's class loaded."""


def assistant(folder: Path, *, centroids: int = 0, **inner: Any) -> Path:
    """A folder like the one that vLLM's class loaded."""
    config, rng = json.loads(json.dumps(ROW["config"])), np.random.default_rng(0)
    config["text_config"] |= inner
    del config["use_ordered_embeddings"]  # false, as where it is absent
    shapes = {name: shape for name, (_, *shape) in ROW["tensors"].items()}
    stored = {name: store(rng.normal(0, 0.05, shape), "BF16") for name, shape in shapes.items()}
    if centroids:
        config |= {"use_ordered_embeddings": True, "num_centroids": centroids}
        rows, width = shapes["model.embed_tokens.weight"]
        groups = rng.normal(0, 0.05, (centroids, width))
        stored["masked_embedding.centroids.weight"] = store(groups, "BF16")
        order = Stored("I64", (rows,), np.arange(rows).tobytes())
        stored["masked_embedding.token_ordering"] = order
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_tensors(folder, stored)
    return folder


@pytest.mark.parametrize("centroids", [0, 16])
def test_it_is_named_quantized_and_checked(centroids: int, tmp_path: Path) -> None:
    source, out = assistant(tmp_path / "draft", centroids=centroids), tmp_path / "out"
    found = dq.inspect(source).to_mapping()
    roles = [tensor["role"] for tensor in found["tensors"]]
    expected = {"attention": 8, "mlp": 12, "fusion": 2, "embedding": 1, "norm": 21, "other": 4}
    expected |= {"proposal": 1, "vocabulary_map": 1} if centroids else {}
    assert (found["family"], found["lints"]) == ("gemma4-assistant", [])
    assert {role: roles.count(role) for role in roles} == expected
    report = dq.quantize(source, "fp8-ptpc", out=out)
    assert {step.row.role for step in report.plan.quantized} == {"attention", "mlp"}
    assert len(report.plan.quantized) == 20
    assert dq.verify(out, against=source).ok
    assert dq.inspect(out).audit.faults == ()  # type: ignore[union-attr]
    dq.dequantize(out, out=tmp_path / "plain")
    for folder, engine in itertools.product((source, out), ("vllm", "sglang")):
        said = dq.check(folder, engine=engine, gpu="h200")
        assert (said.verdict, "--ask" in (said.remedy or "")) == ("UNKNOWN", True)


def test_replay_says_why_not_and_how_large_its_traces_are(tmp_path: Path) -> None:
    source = assistant(tmp_path / "draft")
    with pytest.raises(DraftQuantError, match="read keys and values of two layers") as told:
        load_draft(source)
    assert "2,560 bytes a token" in str(told.value)  # 2 x (512 + 2 x (2 x 64 + 2 x 128))
    with pytest.raises(DraftQuantError, match=r"rounding gptq.*2,560 bytes"):
        dq.plan(source, "int4-channel-gptq")


# Width, heads of keys in sliding and in full layers (None = as many), and bytes of a token.
PUBLISHED = [(5376, 16, 4, 35_328), (2816, 8, 2, 17_920), (1536, 1, None, 6_144)]


@pytest.mark.parametrize(("width", "heads", "fewer", "size"), PUBLISHED)
def test_bytes_of_a_published_token(width: int, heads: int, fewer: int | None, size: int) -> None:
    inner = {**ROW["config"]["text_config"], "head_dim": 256, "global_head_dim": 512}
    inner |= {"num_key_value_heads": heads, "num_global_key_value_heads": fewer}
    inner["attention_k_eq_v"] = fewer is not None
    config = {"backbone_hidden_size": width, "text_config": inner}
    geometry: Any = FAMILY.read_geometry(config, "config.json")
    assert geometry.bytes_of_token == size


@pytest.mark.parametrize("types", [None, ["full_attention"], ["linear_attention"] * 4])
def test_layers_of_other_types_are_refused(types: list[str] | None, tmp_path: Path) -> None:
    source = assistant(tmp_path / "draft", layer_types=types)
    with pytest.raises(DraftQuantError, match="layer_types: expected 4 of sliding_attention and"):
        dq.inspect(source)
