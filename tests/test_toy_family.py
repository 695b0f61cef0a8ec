"""A family is a module: a toy one is added from without, and goes all the way.

`tests/toy_families/toy.py` is what would lie in `quantize/drafts/families`; its passes are of no
kind that is there. And no module but a family's own names a family.
"""

import copy
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from by_recipe import quantized
from draftquant.quantize.drafts import families
from draftquant.quantize.layouts import get_layout
from draftquant.quantize.numerics.quantized_weight import int4_words
from draftquant.quantize.plugins.int4_linear import UnpackedInt4, as_fp8, is_int4_per_channel
from draftquant.recipes import built_in_recipes, load_recipe
from draftquant.scripts.cli import main
from safetensors.torch import load_file, save_file
from test_packaging import MODULES, ROOT
from tied_pair import HIDDEN, VOCAB, prompt_tokens, save_target
from torch import Tensor, nn

TOYS = Path(__file__).parent / "toy_families"
INNER, LAYERS = 32, [1, 3, 4]


@pytest.fixture(scope="module")
def toy() -> Iterator[None]:
    """The registry as it is where the module lies beside those of the other families."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "__path__", [*families.__path__, str(TOYS)])
        before, found = families.FAMILIES, families.discover()
        for module in list(sys.modules.values()):
            if vars(module).get("FAMILIES") is before:
                patch.setattr(module, "FAMILIES", found)
        yield
    for name in [name for name in sys.modules if name.startswith(f"{families.__name__}.toy")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def pair(toy: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a toy draft that is right about its tokens now and then, and traces."""
    del toy
    folder = tmp_path_factory.mktemp("toy")
    target = load_file(save_target(folder / "target") / "model.safetensors")
    noise = torch.Generator().manual_seed(3)

    def small(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise) * 0.3 / shape[-1] ** 0.5

    weights = {
        "model.embed_tokens.weight": target["model.embed_tokens.weight"],
        "lm_head.weight": target["lm_head.weight"],
        "model.fc.weight": small(HIDDEN, len(LAYERS) * HIDDEN),
        "model.decay": torch.full((HIDDEN,), 0.1),
        "model.norm.weight": target["model.norm.weight"],
        "model.layers.0.mlp.gate_proj.weight": small(INNER, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": small(INNER, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": small(HIDDEN, INNER),
    }
    draft = folder / "draft"
    draft.mkdir()
    stored = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    save_file(stored, draft / "model.safetensors")
    config = {
        "architectures": ["ToyForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": 1, "vocab_size": VOCAB,
        "aux_layer_ids": LAYERS, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (draft / "config.json").write_text(json.dumps(config), encoding="utf-8")
    lines = [
        json.dumps({"id": f"p{i}", "category": "a", "token_ids": list(tokens)}) + "\n"
        for i, tokens in enumerate(prompt_tokens(3, 9))
    ]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    argv = ["record", "--target", folder / "target", "--prompts", folder / "prompts.jsonl"]
    argv += ["--draft", draft, "--out", folder / "traces", "--max-new-tokens", "20"]
    assert main([str(word) for word in argv]) == 0
    return folder


def said(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    """What a command prints as JSON."""
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_goes_all_the_way(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its own passes, quantized too; some tokens of it are right."""
    for family in (*families.FAMILIES, *families.discover()):
        assert vars(sys.modules[type(family).__module__])["FAMILY"] is family
    draft, out = pair / "draft", pair / "out"
    assert said(capsys, "inspect", draft)["family"] == "toy"
    plan = said(capsys, "plan", draft, "--recipe", "fp8-ptpc")
    assert [step["action"] for step in plan["tensors"]].count("quantize") == 3
    quantized(draft, "fp8-ptpc", out)
    found = said(capsys, "verify", out, "--against", draft)
    assert (found["ok"], found["quantized"]) == (True, 3)
    for folder in (draft, out):
        (found,) = said(capsys, "replay", folder, "--traces", pair / "traces")
        assert 1.5 < found["mean_acceptance_length"] < 4
    for engine in ("vllm", "sglang"):
        assert main(["check", str(out), "--engine", engine]) != 0
        assert "['ToyForCausalLM']" in capsys.readouterr().out


def test_nothing_but_its_module_names_a_family() -> None:
    """As a text of its own."""
    names = {family.name for family in families.FAMILIES}
    found = []
    for module in MODULES:
        place = module.as_posix()
        own = place.startswith(
            ("quantize/drafts/families/", "scripts/dev/", "quantize/asking/inside/")
        )  # vLLM has methods of these names
        text = "" if own else (ROOT / module).read_text(encoding="utf-8")
        if any(f'"{name}"' in text for name in names):
            found.append(place)
    assert found == []


# ---- a number format more, added the way a developer would: what it takes is seven product files


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
            f'\n[[{engine}.compressed-tensors]]\nclass = "CompressedTensors"\nrefused = "no-ct"\n'
            'schemes = [{ dtype = "toy4" }]\n'
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
    recipe = (ROOT / "recipes" / "fp8-ptpc.yaml").read_text(encoding="utf-8")
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


# ---- what the engines' plugins do with Quark's INT4; that engines take it is shown by --engines


ROWS, COLUMNS = 16, 24


def layer_config(recipe: str) -> dict[str, Any]:
    chosen = load_recipe(recipe).stored
    declared = get_layout("quark").declare(chosen, [])
    config: dict[str, Any] = copy.deepcopy(declared["global_quant_config"])
    return config


def codes() -> Tensor:
    return torch.randint(-8, 8, (ROWS, COLUMNS), generator=torch.manual_seed(0)).to(torch.int8)


class PlainFp8:
    """FP8 weights per channel, multiplied as they are."""

    def create_weights(
        self, layer: nn.Module, output_partition_sizes: list[int], **rest: Any
    ) -> None:
        shape = (sum(output_partition_sizes), rest["input_size_per_partition"])
        layer.weight = parameter(data=torch.zeros(shape, dtype=torch.float8_e4m3fn))
        layer.weight_scale = parameter(data=torch.zeros(shape[0]))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight = parameter(data=layer.weight.data.t())

    def apply_weights(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x @ layer.weight.to(torch.float32) * layer.weight_scale


def parameter(*, data: Tensor, **sharded: Any) -> nn.Parameter:
    made = nn.Parameter(data, requires_grad=False)
    vars(made).update(sharded)
    return made


def unpacked(*, reordered: bool) -> UnpackedInt4:
    return UnpackedInt4(PlainFp8(), reordered=reordered, parameters=PARAMETERS)


def created(scheme: UnpackedInt4, rows: list[int], columns: int) -> Any:
    layer = nn.Module()
    scheme.create_weights(layer, rows, columns, torch.bfloat16, print)
    return layer


def test_only_int4_per_channel_under_fp8_is_taken() -> None:
    quark = [name for name in built_in_recipes() if load_recipe(name).layout == "quark"]
    taken = [name for name in quark if is_int4_per_channel(layer_config(name))]
    assert taken == ["mi325x-w4a8", "mi325x-w4a8-gptq"]
    for name in sorted({*quark} - {*taken}):
        assert as_fp8(layer_config(name)) == layer_config(name)
    other = {"symmetric": False, "qscheme": "per_group", "is_dynamic": True, "ch_axis": 1}
    for key, value in other.items():
        config = layer_config("mi325x-w4a8")
        config["weight"][key] = value
        assert as_fp8(config) is config
    told, declared = as_fp8(layer_config(taken[0]))["weight"], layer_config("mi325x-fp8")["weight"]
    assert all(told[key] == declared[key] for key in ("dtype", *other))


@pytest.mark.parametrize("reordered", [True, False])
def test_served_is_the_product_with_the_codes_and_scales(reordered: bool) -> None:
    scheme = unpacked(reordered=reordered)
    layer = created(scheme, [8, 8], COLUMNS)
    assert layer.weight.shape == (ROWS, COLUMNS // 8)
    assert layer.weight_zero_point.shape == (ROWS // 8,)
    sharded = {"packed_factor": 8, "weight_loader": print, "output_dim": 0}  # between GPUs
    assert vars(layer.weight) == {**sharded, "input_dim": 1, "packed_dim": 1}
    assert vars(layer.weight_zero_point) == {**sharded, "packed_dim": 0}
    layer.weight.data.copy_(int4_words(codes(), interleaved=reordered, unsigned=False))
    layer.weight_scale.data.copy_(torch.linspace(0.5, 2.0, ROWS))
    scheme.process_weights_after_loading(layer)
    x = torch.randn(3, COLUMNS, generator=torch.manual_seed(1))
    expected = x @ codes().float().T * torch.linspace(0.5, 2.0, ROWS)
    assert torch.equal(scheme.apply_weights(layer, x), expected)
    assert "weight_zero_point" not in dict(layer.named_parameters())


def test_a_shard_within_a_word_and_a_zero_point_are_refused() -> None:
    scheme = unpacked(reordered=True)
    for rows, columns in (([8, 4], 24), ([8, 8], 20)):
        with pytest.raises(ValueError, match="fewer tensor-parallel shards"):
            created(scheme, rows, columns)
    layer = created(scheme, [ROWS], COLUMNS)
    layer.weight_zero_point.data[1] = 1
    with pytest.raises(ValueError, match="expected symmetric INT4"):
        scheme.process_weights_after_loading(layer)


class LinearMethod: ...


class OwnQuark:
    """What an engine's own class finds declared of each linear, by its whole name."""

    pack_method = "reorder"
    declared: ClassVar = {"model.layers.0.mlp.up_proj": "mi325x-w4a8",
                          "model.layers.0.mlp.down_proj": "mi325x-fp8"}  # fmt: skip

    def get_quant_method(self, layer: Any, _prefix: str) -> object:
        return LinearMethod() if layer.is_linear else None

    def _find_matched_config(self, prefix: str, _layer: object) -> dict[str, Any]:
        return layer_config(self.declared[prefix])

    def _get_scheme_from_config(self, config: dict[str, Any], dynamic: bool = False) -> Any:
        return config["weight"]["dtype"], dynamic  # SGLang, and vLLM to 0.29

    def _get_scheme_cls_from_config(self, config: dict[str, Any]) -> Any:
        return config["weight"]["dtype"]  # vLLM from 0.30


METHODS: dict[str, type] = {}
QUARK = {"QuarkConfig": OwnQuark, "QuarkLinearMethod": LinearMethod}
PARAMETERS = SimpleNamespace(PackedvLLMParameter=parameter, PackedColumnParameter=parameter)
ENGINES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "vllm.general_plugins": ("vllm.model_executor", {
        "": {"parameter": PARAMETERS},
        "layers.quantization": {
            "register_quantization_config": lambda name: partial(METHODS.__setitem__, name)
        },
        "layers.quantization.quark.quark": QUARK,
    }),
    "sglang.srt.plugins": ("sglang.srt", {
        "layers": {"parameter": PARAMETERS},
        "layers.quantization": {"QUANTIZATION_METHODS": METHODS},
        "layers.quantization.quark.quark": QUARK,
    }),
}  # fmt: skip
"""Group of entry points -> the modules of the engine that its plugin imports from."""


@pytest.mark.parametrize("group", ENGINES)
def test_engines_take_our_class_in_the_place_of_their_own(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With modules of the test's: a linear gets INT4 where that is declared of it."""
    METHODS.clear()
    root, given = ENGINES[group]
    for below, held in given.items():
        parts = [*root.split("."), *filter(None, below.split("."))]
        for name in itertools.accumulate(parts, "{}.{}".format):
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[".".join(parts)]).update(held)
    (found,) = (point for point in entry_points(group=group) if point.name == "draftquant")
    try:
        found.load()()
    finally:
        sys.modules.pop(found.module, None)
    assert issubclass(METHODS["quark"], OwnQuark)
    ours, options = METHODS["quark"](), {"dynamic": True} if group.startswith("vllm") else {}
    scheme = ours._get_scheme_from_config(layer_config("mi325x-w4a8"), **options)
    assert scheme == ("fp8_e4m3", bool(options))
    assert ours._get_scheme_cls_from_config(layer_config("mi325x-w4a8")) == "fp8_e4m3"
    for prefix, recipe in OwnQuark.declared.items():
        layer = SimpleNamespace(is_linear=True, scheme=PlainFp8())
        assert isinstance(ours.get_quant_method(layer, prefix), LinearMethod)
        unpacked = (UnpackedInt4, PlainFp8)[recipe == "mi325x-fp8"]
        assert type(layer.scheme) is unpacked
    assert ours.get_quant_method(SimpleNamespace(is_linear=False), "model.embed_tokens") is None
