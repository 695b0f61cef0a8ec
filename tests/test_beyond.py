"""Beyond the layers: a head and an fc that a recipe quantizes, and what is refused of them."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.quantize.algorithms import InputMoments
from draftquant.quantize.backends import get_backend
from draftquant.quantize.converting.dequantize_draft import dequantize_draft
from draftquant.quantize.converting.transcode_draft import plan_transcoding, transcode_draft
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.estimate.draft_step import draft_round, planned_weights
from draftquant.quantize.estimate.work import VerifyStep
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.files.provenance import GptqFactors
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.planning.quantization_plan import Measured, Plan, make_plan
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.quantize.verify import verify
from draftquant.quantize.verify.audit import audit_checkpoint
from draftquant.recipes import Recipe, load_recipe
from draftquant.recipes.errors import LayoutError, PlanError
from heads import BEYOND, FUSION, HEAD, beyond
from mixes import FP8, INT4
from tiny import read_tensors, tiny_eagle3_llama, write_tensors
from tiny_dflash import tiny_dflash
from tiny_mla import tiny_eagle3_mla
from verify_cases import edit, edit_declaration, faults_of, flip_bit
from wide import WIDE

pytestmark = pytest.mark.usefixtures("one_thread")

BUILDERS: Mapping[str, Any] = {
    "eagle3-llama": tiny_eagle3_llama,
    "eagle3-mla": tiny_eagle3_mla,
    "dflash": tiny_dflash,
}
SCALE = 0.01


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Drafts with a head and an embedding of their own; float16 ones for AWQ."""
    folder = tmp_path_factory.mktemp("sources")
    return {
        f"{name} {dtype}": make(
            folder / f"{name}-{dtype}", dtype=dtype, head=True, embed=True, vocab=128, **WIDE[name]
        )
        for name, make in BUILDERS.items()
        for dtype in ("BF16", "F16")
    }


@pytest.fixture(scope="module")
def source(sources: Mapping[str, Path]) -> Path:
    return sources["eagle3-llama BF16"]


def planned(source: Path, recipe: Recipe) -> Plan:
    return make_plan(recipe, read_draft(Checkpoint.open(source)), target_layers=8)


def quantized(source: Path, recipe: Recipe, out: Path, **measured: Any) -> Plan:
    plan = planned(source, recipe)
    scales = {step.row.module: SCALE for step in plan.quantized}
    quantize_draft(
        plan,
        out,
        source=DraftSource(folder=source),
        measured=Measured(
            input_scales=scales if recipe.needs_input_scales else {},
            input_scale_origin="constant",
            **measured,
        ),
    )
    return plan


def declaration(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))[
        "quantization_config"
    ]
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.parametrize("family", BUILDERS)
def test_a_folder_is_verified_audited_and_decoded(
    family: str, name: str, sources: Mapping[str, Path], tmp_path: Path
) -> None:
    recipe = BEYOND[name]
    source = sources[f"{family} {'F16' if recipe.layout == 'awq' else 'BF16'}"]
    out = tmp_path / "out"
    plan = quantized(source, recipe, out)
    beyond_layers = [s.row for s in plan.quantized if s.row.role in ("head", "fusion")]
    assert {row.role for row in beyond_layers} == {
        role for role, pattern in (("head", HEAD), ("fusion", FUSION))
        if any(rule.tensor == pattern for rule in recipe.rules)
    }  # fmt: skip

    report = verify(out, source)
    assert report.ok, report.faults
    assert report.quantized == len(plan.quantized)
    assert audit_checkpoint(Checkpoint.open(out)).faults == ()

    loaded = load_draft(out)
    assert set(loaded.quantized) == {
        s.row.canonical.removesuffix(".weight") for s in plan.quantized
    }
    bf16 = load_draft(source)
    for step in plan.quantized:
        if step.row not in beyond_layers:
            continue
        form = plan.format_of(step)
        exact = bf16.weights[step.row.canonical]
        absmax = exact.abs().amax().reshape(1, 1) if form.weights.scales_whole_matrix else None
        dtype = torch.float16 if recipe.layout == "awq" else torch.bfloat16
        codes = get_backend("torch").quantize(exact.to(dtype), form.weights, absmax)
        found = loaded.weights[step.row.canonical]
        # The inverse of NVFP4's global scale is stored in compressed-tensors.
        torch.testing.assert_close(found, codes.dequantized(), rtol=2**-22, atol=0)
        assert not torch.equal(found, exact)


@pytest.mark.parametrize("name", ["fp8-head", "int4-group128-head", "fp8-fc", "int4-fc"])
@pytest.mark.parametrize("family", BUILDERS)
def test_replay_multiplies_the_decoded_weight_by_inputs_as_declared(
    family: str, name: str, sources: Mapping[str, Path], tmp_path: Path
) -> None:
    """The maths of the unquantized draft over the decoded weights, its inputs rounded by hand."""
    source, out = sources[f"{family} BF16"], tmp_path / "out"
    quantized(source, BEYOND[name], out)
    loaded = load_draft(out)

    def rounded(module: str, x: torch.Tensor) -> torch.Tensor:
        if loaded.activations.get(module) != "token-dynamic":
            return x
        scale = x.abs().amax(-1, keepdim=True) / 448
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    by_hand = loaded.family.forward(loaded.geometry, loaded.weights, rounded)
    geometry = loaded.geometry
    generator = torch.Generator().manual_seed(0)
    width = geometry.num_aux_layers * geometry.target_hidden_size
    features = torch.randn(1, 5, width, generator=generator)
    hidden = torch.randn(1, 5, geometry.hidden_size, generator=generator)
    torch.testing.assert_close(loaded.forward.fuse(features), by_hand.fuse(features))
    torch.testing.assert_close(loaded.forward.logits(hidden), by_hand.logits(hidden))
    part = "fc" if name.endswith("fc") else "lm_head"
    assert part in loaded.quantized
    bf16 = load_draft(source).forward
    both = (
        (loaded.forward.fuse(features), bf16.fuse(features)),
        (loaded.forward.logits(hidden), bf16.logits(hidden)),
    )
    fused_differs, logits_differ = ((a - b).abs().max() > 1e-4 for a, b in both)
    assert (bool(fused_differs), bool(logits_differ)) == (part == "fc", part == "lm_head")


def test_the_declaration_names_a_head_of_the_usual_format(source: Path, tmp_path: Path) -> None:
    quantized(source, BEYOND["fp8-head"], tmp_path / "out")
    declared = declaration(tmp_path / "out")
    groups = declared["config_groups"]
    assert [group["targets"] for group in groups.values()] == [["Linear"], ["re:.*lm_head$"]]
    same = [{k: v for k, v in group.items() if k != "targets"} for group in groups.values()]
    assert same[0] == same[1]
    assert declared["format"] == "float-quantized"
    assert declared["ignore"] == ["embed_tokens", "model.embed_tokens", "fc", "model.fc",
                                  "re:.*embed_tokens$", "re:.*fc$"]  # fmt: skip


def test_modelopt_excludes_what_is_kept_alone(source: Path, tmp_path: Path) -> None:
    quantized(source, BEYOND["modelopt-fp8-head"], tmp_path / "out")
    declared = declaration(tmp_path / "out")
    assert declared["exclude_modules"] == declared["ignore"] == ["*embed_tokens*", "*fc*"]
    side = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text(encoding="utf-8"))
    assert side["quantization"]["exclude_modules"] == ["*embed_tokens*", "*fc*"]


def test_an_fc_of_another_name_is_not_excluded_as_fc(tmp_path: Path) -> None:
    """Engines know TorchSpec's context_proj as fc."""
    arguments = dict(spelling="torchspec", **WIDE["dflash"])
    source = tiny_dflash(tmp_path / "draft", **arguments)
    rules = tuple(
        dataclasses.replace(r, action="quantize", why=None) if r.role == ("fusion",) else r
        for r in load_recipe("fp8-ptpc").rules
    )
    recipe = dataclasses.replace(load_recipe("fp8-ptpc"), rules=rules)
    plan = make_plan(recipe, read_draft(Checkpoint.open(source)))
    assert "context_proj.weight" in {step.row.tensor.name for step in plan.quantized}
    assert not any("fc" in name or "context" in name for name in plan.kept_modules())


def test_expect_counts_layers_alone(source: Path) -> None:
    plan = planned(source, BEYOND["int4-head-and-fc"])
    assert len(plan.quantized) == 9
    assert plan.recipe.expect.quantized_per_layer == 7


def test_verify_sees_a_bit_of_the_head_and_a_target_that_is_gone(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    quantized(source, BEYOND["fp8-head"], out)

    def flip(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = flip_bit(tensors["lm_head.weight"], 3)

    edit(out, flip)
    assert "lm_head.weight" in faults_of(verify(out, source))
    edit(out, flip)
    assert verify(out, source).ok
    edit_declaration(out, lambda declared: declared["config_groups"].pop("group_1"))
    assert "config_groups.group_1" in faults_of(verify(out, source))


def test_a_head_that_is_not_in_the_recipe_is_a_fault(source: Path, tmp_path: Path) -> None:
    quantized(source, BEYOND["fp8-head"], tmp_path / "with")
    quantized(source, load_recipe("fp8-ptpc"), tmp_path / "out")
    head = {k: v for k, v in read_tensors(tmp_path / "with").items() if k.startswith("lm_head")}
    edit(tmp_path / "out", lambda tensors: tensors.update(head))
    said = faults_of(verify(tmp_path / "out", source))
    assert "lm_head: expected kept (recipe fp8-ptpc), got quantized" in said


def test_dequantized_and_transcoded(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantized(source, BEYOND["fp8-head"], out)
    dequantize_draft(DraftSource(folder=out), tmp_path / "plain", dtype="F32")
    plain, loaded = load_draft(tmp_path / "plain"), load_draft(out)
    assert torch.equal(plain.weights["lm_head.weight"], loaded.weights["lm_head.weight"])

    plan = plan_transcoding(DraftSource(folder=out), "modelopt")
    transcode_draft(plan, tmp_path / "modelopt")
    transcode_draft(
        plan_transcoding(DraftSource(folder=tmp_path / "modelopt"), "compressed-tensors"),
        tmp_path / "back",
    )
    for other in ("modelopt", "back"):
        assert verify(tmp_path / other, source).ok
    assert declaration(tmp_path / "back") == declaration(out)
    with pytest.raises(LayoutError, match="engines do not load a quantized head") as caught:
        plan_transcoding(DraftSource(folder=out), "quark")
    assert "compressed-tensors" in str(caught.value.fix)


def test_folders_of_several_formats_are_not_transcoded(source: Path, tmp_path: Path) -> None:
    quantized(source, BEYOND["int4-group128-head"], tmp_path / "out")
    with pytest.raises(LayoutError, match="expected one format for all linears"):
        plan_transcoding(DraftSource(folder=tmp_path / "out"), "quark")


def test_a_group_for_every_linear_that_names_the_head_too(source: Path, tmp_path: Path) -> None:
    """As other tools write it: one group, two targets."""
    out = tmp_path / "out"
    quantized(source, BEYOND["fp8-head"], out)
    ours = load_draft(out)

    def one_group(declared: dict[str, Any]) -> None:
        del declared["config_groups"]["group_1"]
        declared["config_groups"]["group_0"]["targets"] = ["Linear", "re:.*lm_head"]

    edit_declaration(out, one_group)
    (out / "draftquant.json").unlink()
    theirs = load_draft(out)
    assert theirs.quantized == ours.quantized
    assert torch.equal(theirs.weights["lm_head.weight"], ours.weights["lm_head.weight"])
    assert verify(out, source, foreign=True).ok


def test_the_head_is_read_in_fewer_bytes(source: Path) -> None:
    draft = read_draft(Checkpoint.open(source))

    def head_bytes(recipe: Recipe) -> float:
        weights = planned_weights(make_plan(recipe, draft))
        step = draft_round(draft, weights, VerifyStep(3, 8)).step
        return step.nbytes(1, "head")

    assert head_bytes(load_recipe("fp8-ptpc")) == 128 * 128 * 2
    assert head_bytes(BEYOND["fp8-head"]) == 128 * 128 + 128 * 4
    assert head_bytes(BEYOND["int4-group128-head"]) == 128 * 128 // 2 + 128 * 2 + 16


# What is refused.


def refused(source: Path, recipe: Recipe, what: str, fix: str) -> None:
    with pytest.raises((PlanError, LayoutError)) as caught:
        planned(source, recipe)
    assert what in str(caught.value), caught.value
    assert fix in str(caught.value.fix), caught.value.fix


@pytest.mark.parametrize("layout", ["quark", "fp8", "awq"])
def test_a_layout_in_which_no_engine_reads_a_head(layout: Any, sources: Mapping[str, Path]) -> None:
    usual = {"quark": "quark-fp8-fc", "fp8": "fp8-layout-fc", "awq": "awq-fc"}[layout]
    recipe = BEYOND[usual]
    own = recipe.formats[0]
    source = sources[f"eagle3-llama {'F16' if layout == 'awq' else 'BF16'}"]
    recipe = beyond("head", own, head=own, layout=layout)
    refused(source, recipe, "do not load a quantized head", "modelopt or compressed-tensors")


def test_a_head_in_blocks(source: Path) -> None:
    weights = dataclasses.replace(FP8.weights, granularity="block", group_size=128)
    group = dataclasses.replace(FP8.activations, granularity="group")  # type: ignore[type-var]
    blocks = dataclasses.replace(FP8, weights=weights, activations=group)
    refused(source, beyond("blocks", FP8, head=blocks), "scales per block", "per channel")
    assert planned(source, beyond("blocks", FP8, fusion=blocks)).quantized


def test_a_head_that_config_json_ties(tmp_path: Path) -> None:
    config = {"tie_word_embeddings": True}
    source = tiny_eagle3_llama(tmp_path / "draft", config=config, **WIDE["eagle3-llama"])
    refused(source, BEYOND["fp8-head"], "config.json ties it to the embedding", "keep the head")


def test_a_head_that_is_the_embedding(tmp_path: Path) -> None:
    source = tiny_eagle3_llama(tmp_path / "draft", **WIDE["eagle3-llama"])
    tensors = read_tensors(source)
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    write_tensors(source, tensors, metadata={"format": "pt"})
    with pytest.raises(PlanError, match=r"it equals embed_tokens\.weight byte for byte"):
        quantized(source, BEYOND["fp8-head"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    tensors["lm_head.weight"] = flip_bit(tensors["lm_head.weight"], 8 * 2 * 128 * 95)
    write_tensors(source, tensors, metadata={"format": "pt"})
    quantized(source, BEYOND["fp8-head"], tmp_path / "out")


def test_a_draft_without_a_head(tmp_path: Path) -> None:
    source = tiny_eagle3_llama(tmp_path / "draft", head=False, **WIDE["eagle3-llama"])
    rules = tuple(
        dataclasses.replace(r, action="quantize", why=None, optional=False)
        if r.role == ("head",)
        else r
        for r in load_recipe("fp8-ptpc").rules
    )
    recipe = dataclasses.replace(load_recipe("fp8-ptpc"), rules=rules)
    refused(source, recipe, "the draft has the target's", "optional: true")


@pytest.mark.parametrize("part", ["head", "fusion"])
def test_codes_that_are_learned(part: str, source: Path) -> None:
    recipe = beyond("learned", INT4, **{part: INT4})  # type: ignore[arg-type]
    algorithm = dataclasses.replace(recipe.algorithm, scale="mse", rounding="learned")
    recipe = dataclasses.replace(recipe, algorithm=algorithm)
    said = "rounding learned compares drafts between fc and the head"
    refused(source, recipe, said, "keep")
    fp8 = beyond("learned", INT4, **{part: FP8})  # type: ignore[arg-type]
    refused(source, dataclasses.replace(fp8, algorithm=algorithm), said, "keep")


def test_gptq_of_fc(source: Path) -> None:
    recipe = beyond("gptq", INT4, fusion=INT4)
    algorithm = dataclasses.replace(recipe.algorithm, scale="mse", rounding="gptq")
    recipe = dataclasses.replace(recipe, algorithm=algorithm)
    refused(source, recipe, "second moments of all 384 features", "eight bits")
    fp8 = dataclasses.replace(beyond("gptq", INT4, fusion=FP8), algorithm=algorithm)
    assert planned(source, fp8).quantized  # of eight bits nearest codes are as good


def moments_of(rows: torch.Tensor) -> InputMoments:
    return InputMoments(rows.T @ rows / len(rows), torch.device("cpu"))


def test_gptq_of_a_head_comes_closer_in_outputs(source: Path, tmp_path: Path) -> None:
    recipe = beyond("gptq", INT4, head=INT4)
    algorithm = dataclasses.replace(recipe.algorithm, scale="mse", rounding="gptq")
    recipe = dataclasses.replace(recipe, algorithm=algorithm)
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(256, 256, generator=generator)
    inputs = {width: torch.randn(512, width, generator=generator) @ mixing[:width, :width]
              for width in (128, 256)}  # fmt: skip
    asked = []

    class Statistics:
        def measure(self, modules: Any) -> None:
            asked.extend(modules)

        too_few: Mapping[str, int] = {}
        factors = GptqFactors(dtype="float32")

        def second_moments(self, modules: Any) -> Mapping[str, InputMoments]:
            widths = {m: 256 if m.endswith(("q_proj", "k_proj", "v_proj", "down_proj")) else 128
                      for m in modules}  # fmt: skip
            return {module: moments_of(inputs[width]) for module, width in widths.items()}

    quantized(source, recipe, tmp_path / "gptq", statistics=Statistics())
    quantized(source, beyond("near", INT4, head=INT4), tmp_path / "near")
    assert "lm_head" in asked
    exact = load_draft(source).weights["lm_head.weight"]

    def error(folder: str) -> float:
        difference = load_draft(tmp_path / folder).weights["lm_head.weight"] - exact
        return float((inputs[128] @ difference.T).square().mean())

    assert error("gptq") < 0.8 * error("near")
    assert verify(tmp_path / "gptq", source).ok


def test_of_a_foreign_head_the_gate_asks_where_it_points(source: Path, tmp_path: Path) -> None:
    from draftquant.recipes.errors import GateError
    from draftquant.validate.judging.candidate_origin import DraftFolder, check_loaded

    out = tmp_path / "out"
    quantized(source, BEYOND["fp8-head"], out)
    (out / "draftquant.json").unlink()
    folder, baseline = DraftFolder.read(out), load_draft(source)
    assert check_loaded(baseline, load_draft(out), folder) == ()

    candidate = load_draft(out)
    weights = dict(candidate.weights)
    weights["lm_head.weight"] = weights["lm_head.weight"].flip(0)
    with pytest.raises(GateError, match=r"lm_head.weight has a cosine of"):
        check_loaded(baseline, _with(candidate, weights), folder)


def _with(draft: LoadedDraft, weights: Mapping[str, torch.Tensor]) -> LoadedDraft:
    return dataclasses.replace(draft, weights=weights)
