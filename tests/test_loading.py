"""Loading: every layout gives the weights and the activation rounding that its folder declares."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from draftquant.quantize.drafts.forward import softmax_attention
from draftquant.quantize.errors import CheckpointError, VerifyError
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from handmade import MADE, quantize_by_hand
from handmade_numbers import e4m3_value
from tiny import Stored, edit_json, read_tensors, store, tiny_eagle3_llama, values_of, write_tensors
from torch import Tensor

Q = "layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loading") / "source"
    return tiny_eagle3_llama(folder, pruned_vocabulary=True)


def run(draft: LoadedDraft, *, rows: int = 5) -> Tensor:
    """Logits of one teacher-forced step over a few rows."""
    generator = torch.Generator().manual_seed(0)
    dtype = draft.weights["fc.weight"].dtype
    features = torch.randn(1, rows, draft.weights["fc.weight"].shape[1], generator=generator)
    tokens = torch.randint(0, 96, (1, rows), generator=generator)
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()
    hidden = draft.forward.step(
        tokens,
        draft.forward.fuse(features.to(dtype)),
        torch.arange(rows),
        lambda _layer, q, k, v, scale: softmax_attention(q, k, v, scale, causal),
    )
    return draft.forward.logits(hidden)


# ---- weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_unquantized_draft(source: Path, dtype: torch.dtype) -> None:
    draft = load_draft(source, dtype=dtype)
    stored = read_tensors(source)
    assert (draft.name, draft.family.name, draft.quantized) == ("source", "eagle3-llama", ())
    assert len(draft.linears) == 7
    for name, tensor in stored.items():
        canonical = name.replace("midlayer.", "layers.0.")
        weight = draft.weights[canonical]
        if tensor.dtype == "BF16":
            expected = torch.from_numpy(values_of(tensor).copy()).to(dtype)
            torch.testing.assert_close(weight, expected, rtol=0, atol=0)
    assert draft.weights["d2t"].dtype == torch.int64
    assert draft.weights["d2t"].numpy().tobytes() == stored["d2t"].data
    assert draft.weights["t2d"].dtype == torch.bool
    assert int(draft.weights["t2d"].sum()) == 48
    assert len(draft.weights) == len(stored)


@pytest.mark.parametrize("name", sorted(MADE))
def test_every_layout_gives_the_dequantized_weights(
    name: str, source: Path, tmp_path: Path
) -> None:
    exact = load_draft(source)
    draft = load_draft(quantize_by_hand(source, tmp_path / "out", MADE[name]))
    assert draft.quantized == draft.linears == exact.linears
    limit = 0.03 if MADE[name].dtype == "fp8" else 0.15
    for key, weight in exact.weights.items():
        if key.removesuffix(".weight") in draft.linears:
            error = (draft.weights[key] - weight).norm() / weight.norm()
            assert 0.01 < error < limit
        else:
            assert torch.equal(draft.weights[key], weight)
    assert draft.fusion_sha256 == exact.fusion_sha256


def test_equal_codes_in_two_layouts_give_equal_weights(source: Path, tmp_path: Path) -> None:
    names = ("quark-int4", "quark-int4-order", "ct-int4")
    drafts = [load_draft(quantize_by_hand(source, tmp_path / n, MADE[n])) for n in names]
    for other in drafts[1:]:
        assert all(torch.equal(w, other.weights[k]) for k, w in drafts[0].weights.items())


@pytest.mark.parametrize(
    "options",
    [
        {"prefix": "model.layers.0.", "num_layers": 2},
        {"sharded": True, "dtype": "F16"},
        {"intermediate": 100},
    ],
    ids=str,
)
def test_variants_of_the_draft(options: dict[str, object], tmp_path: Path) -> None:
    draft = tiny_eagle3_llama(tmp_path / "source", **options)  # type: ignore[arg-type]
    loaded = load_draft(quantize_by_hand(draft, tmp_path / "out", MADE["ct-int4"]))
    exact = load_draft(draft)
    assert loaded.quantized == tuple(sorted(exact.linears))
    assert {k: w.shape for k, w in loaded.weights.items()} == {
        k: w.shape for k, w in exact.weights.items()
    }
    assert torch.isfinite(run(loaded)).all()


def test_a_linear_that_is_kept_stays_exact(source: Path, tmp_path: Path) -> None:
    out = quantize_by_hand(source, tmp_path / "out", MADE["quark-fp8"])
    tensors, name = read_tensors(out), "midlayer.mlp.down_proj"
    del tensors[f"{name}.weight_scale"]
    tensors[f"{name}.weight"] = read_tensors(source)[f"{name}.weight"]
    write_tensors(out, tensors)
    draft = load_draft(out)
    assert "layers.0.mlp.down_proj" not in draft.quantized
    assert "layers.0.mlp.down_proj" in draft.linears


# ---- activations


def observed(folder: Path) -> tuple[dict[str, Tensor], Tensor]:
    """(inputs before rounding, logits)."""
    seen: dict[str, Tensor] = {}

    def observe(name: str, x: Tensor) -> Tensor:
        seen[name] = x
        return x

    return seen, run(load_draft(folder, on_input=observe))


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """To FP8 and back by the nearest of the 253 finite values."""
    codes = (code for code in range(256) if code % 128 != 127)
    grid = torch.tensor(sorted({e4m3_value(code) for code in codes}))
    nearest = ((x / scale)[..., None] - grid).abs().argmin(-1)
    values: Tensor = grid[nearest] * scale
    return values


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("quark-int4", "none"),
        ("quark-int4-dynamic", "dynamic"),
        ("ct-fp8", "dynamic"),
        ("modelopt-fp8-pcpt", "dynamic"),
        ("quark-int4-static", "static"),
        ("ct-fp8-static", "static"),
        ("modelopt-fp8", "static"),
    ],
)
def test_inputs_are_rounded_as_declared(name: str, kind: str, source: Path, tmp_path: Path) -> None:
    out = quantize_by_hand(source, tmp_path / "out", MADE[name], input_scale=0.004)
    draft = load_draft(out)
    x = torch.randn(3, 7, 64, generator=torch.Generator().manual_seed(1))
    x[0, 0] = 0
    got = draft.forward.on_input("layers.0.mlp.gate_proj", x)  # type: ignore[attr-defined]
    if kind == "none":
        assert torch.equal(got, x)
        return
    scale = torch.tensor(0.004)
    if kind == "dynamic":
        scale = x.abs().amax(-1, keepdim=True) / 448
        scale[0, 0] = 1
    else:
        assert x.abs().max() > 448 * 0.004
        assert float(got.abs().max()) == pytest.approx(448 * 0.004)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, rounded(x, scale), rtol=1e-6, atol=0)


def test_on_input_sees_what_is_not_rounded_yet(source: Path, tmp_path: Path) -> None:
    out = quantize_by_hand(source, tmp_path / "out", MADE["quark-int4-static"], input_scale=1e-4)
    seen, logits = observed(out)
    assert sorted(seen) == sorted(load_draft(out).linears)
    assert float(seen[Q].abs().max()) > 448e-4  # what rounding with this scale would clip
    assert torch.equal(logits, run(load_draft(out)))


def test_only_quantized_linears_round_their_input(source: Path) -> None:
    x = torch.randn(2, 2, 64)
    forward = load_draft(source).forward
    assert forward.on_input(Q, x) is x  # type: ignore[attr-defined]


# ---- shared embedding and head


def test_embedding_and_head_of_the_target(source: Path, tmp_path: Path) -> None:
    bare = tiny_eagle3_llama(tmp_path / "bare", embed=False, head=False)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is not stored(.|\n)*target"):
        load_draft(bare)
    shared = {
        "embed_tokens.weight": torch.randn(96, 64),
        "lm_head.weight": torch.randn(96, 64),
    }
    draft = load_draft(bare, shared=shared, dtype=torch.float64)
    for name, weight in shared.items():
        assert torch.equal(draft.weights[name], weight.double())
    shared["lm_head.weight"] = torch.randn(95, 64)
    with pytest.raises(CheckpointError, match=r"expected shape \[96, 64\], the target's is \[95"):
        load_draft(bare, shared=shared)
    own = load_draft(source, shared=shared)
    assert own.weights["lm_head.weight"].shape == (48, 64)


# ---- fusion hash


def test_the_fusion_hash_depends_on_fc_alone(source: Path, tmp_path: Path) -> None:
    before = load_draft(source).fusion_sha256
    assert len(before) == 64
    for number, (name, same) in enumerate({"fc.weight": False, "norm.weight": True}.items()):
        changed = tiny_eagle3_llama(tmp_path / str(number), pruned_vocabulary=True)
        tensors = read_tensors(changed)
        tensors[name] = store(values_of(tensors[name]) * 2, "BF16")
        write_tensors(changed, tensors)
        assert (load_draft(changed).fusion_sha256 == before) is same
    data = b"fc.weight" + read_tensors(source)["fc.weight"].data
    assert before == hashlib.sha256(data).hexdigest()


# ---- broken folders


@pytest.mark.parametrize(
    ("name", "suffix", "change", "message"),
    [
        ("quark-int4", "weight_scale", None, r"weight_scale: quark int4 .* got none"),
        ("ct-int4", "weight_packed", None, "weight_packed: compressed-tensors int4 .* got none"),
        ("quark-int4", "weight_scale", Stored("F32", (63,), bytes(252)), r"got F32 \[63\]"),
        ("modelopt-fp8", "input_scale", None, "input_scale: modelopt fp8_e4m3 .* got none"),
        ("modelopt-fp8", "input_scale", Stored("F32", (), bytes(4)), "positive scale, got 0.0"),
        (
            "quark-fp8",
            "weight_scale",
            Stored("F32", (64,), bytes(256)),
            r"64 other\(s\), first 0.0",
        ),
        ("modelopt-nvfp4", "weight_scale_2", Stored("F32", (), bytes(4)), "first 0.0 at row 0"),
        ("ct-nvfp4", "weight_global_scale", Stored("F32", (1,), bytes(4)), "first inf at row 0"),
        ("awq", "scales", Stored("F16", (4, 64), bytes(512)), r"256 other\(s\), first 0.0"),
    ],
)
def test_a_linear_not_stored_as_declared(
    source: Path, tmp_path: Path, name: str, suffix: str, change: Stored | None, message: str
) -> None:
    out = quantize_by_hand(source, tmp_path / "out", MADE[name])
    tensors, key = read_tensors(out), f"midlayer.self_attn.q_proj.{suffix}"
    if change is None:
        del tensors[key]
    else:
        tensors[key] = change
    write_tensors(out, tensors)
    with pytest.raises(CheckpointError, match=message):
        load_draft(out)


def test_a_quantized_fc_is_refused(source: Path, tmp_path: Path) -> None:
    out = quantize_by_hand(source, tmp_path / "out", MADE["quark-fp8"])
    tensors = read_tensors(out)
    tensors["fc.weight"] = Stored("F8_E4M3", (64, 192), bytes(64 * 192))
    tensors["fc.weight_scale"] = Stored("F32", (64,), np.ones(64, np.float32).tobytes())
    write_tensors(out, tensors)
    with pytest.raises(CheckpointError, match="fc is quantized; engines keep the fusion"):
        load_draft(out)


def test_declarations_and_tensors_that_do_not_fit(source: Path, tmp_path: Path) -> None:
    out = quantize_by_hand(source, tmp_path / "out", MADE["quark-int4"])
    config = json.loads((out / "config.json").read_text())
    edit_json(out / "config.json", quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(VerifyError, match="got 'bitsandbytes'"):
        load_draft(out)
    edit_json(out / "config.json", quantization_config=None)
    with pytest.raises(CheckpointError, match=r"weight_scale|expected shape|expected BF16"):
        load_draft(out)
    (out / "config.json").write_text(json.dumps(config))
    tensors = read_tensors(out)
    tensors["other.weight_scale"] = tensors["midlayer.self_attn.q_proj.weight_scale"]
    write_tensors(out, tensors)
    with pytest.raises(CheckpointError, match="other is stored quantized, but is no linear"):
        load_draft(out)
