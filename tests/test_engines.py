"""`check`: its predictions beside what the engines really did, its rules one by one, the command.

The truth is `engines/results.json`: loading executed with the engines' own classes.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.engines.contract import EngineCheck, EngineName, UnsureError
from draftquant.quantize.engines.engine_check import check_draft
from draftquant.quantize.engines.excludes import (
    exact_or_regex,
)
from draftquant.recipes.errors import CheckpointError
from draftquant.scripts.cli import main
from reasons import own_text
from tiny import read_tensors, tiny_eagle3_llama, write_tensors

ENGINES_FOLDER = Path(__file__).parents[1] / "experiments" / "engines"
sys.path.append(str(ENGINES_FOLDER))  # its modules stand alone

from cases import (  # noqa: E402
    BROKEN,
    FAMILIES,
    NUM_TARGET_LAYERS,
    Workshop,
    _broken,
    _cut,
    _quantized,
    beyond_cases,
    mixed_cases,
)
from cut_heads import CUT_HEADS, CutHead  # noqa: E402
from draftquant.recipes import Recipe  # noqa: E402
from formats import FamilyName, all_formats, format_recipe  # noqa: E402
from predictions import parameter_mismatches, predicted  # noqa: E402
from results import (  # noqa: E402
    Outcome,
    read_outcomes,
)

OTHER_TEXT = {
    "broken--group-splits-shard",
    "broken--mla-quark-exclude-bare",
    "eagle3-mla--modelopt-nvfp4-head",
    "dflash--modelopt-nvfp4-head",
}
"""Several things are wrong: which of them an engine meets first follows the order of tensors, and
in the first of these whether the package humming-kernels is there, which vLLM's wheel asks for."""
NOT_READ = ("cut--dflash2",)
"""Not read as drafts: `check` ends with 2, and no engine serves them as their heads say."""
DOWN_PROJ = "midlayer.mlp.down_proj"
FORMATS_OF = "eagle3-mla"  # the family in which the engines differ most


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    out = tmp_path_factory.mktemp("engines")
    return Workshop(out)


@pytest.fixture(scope="module")
def formats() -> list[Recipe]:
    return all_formats()


def _cut_name(one: CutHead) -> str:
    return f"cut--{one.name.replace(' ', '-')}"


class Folders:
    """Unquantized drafts, broken folders, formats of one family: each made when it is asked for."""

    def __init__(self, workshop: Workshop, formats: Sequence[Recipe]) -> None:
        self._workshop = workshop
        self._making: dict[str, Callable[[], object]] = {
            **{f"{name}--unquantized": partial(self._unquantized, name) for name in FAMILIES},
            **{f"broken--{row['draft']}": partial(_broken, workshop, row) for row in BROKEN},
            **{_cut_name(one): partial(_cut, workshop, one) for one in CUT_HEADS},
            **{
                f"{FORMATS_OF}--{recipe.name}": partial(
                    _quantized, workshop, "format", FORMATS_OF, recipe
                )
                for recipe in formats
            },
        }

    def __truediv__(self, name: str) -> Path:
        making = self._making.pop(name, None)
        if making is not None:
            making()
        return self._workshop.out / name

    @cached_property
    def whole(self) -> Path:
        """The folder of all of them, and of mixed drafts of all families."""
        for making in self._making.values():
            making()
        self._making.clear()
        mixed_cases(self._workshop)
        beyond_cases(self._workshop)
        return self._workshop.out

    def _unquantized(self, family: FamilyName) -> None:
        source = self._workshop.source(family)
        source.rename(self._workshop.out / f"{family}--unquantized")


@pytest.fixture(scope="module")
def folders(workshop: Workshop, formats: list[Recipe]) -> Folders:
    return Folders(workshop, formats)


@pytest.fixture(scope="module")
def answers(folders: Folders) -> list[tuple[Outcome, EngineCheck]]:
    """Every outcome of the truth whose folder is made, and what `check` says of it."""
    made = folders.whole
    return [
        (outcome, predicted(made / outcome["draft"], outcome))
        for outcome in read_outcomes()
        if (made / outcome["draft"]).is_dir() and outcome["draft"] not in NOT_READ
    ]


@pytest.mark.slow
def test_predictions_are_what_the_engines_did(answers: list[tuple[Outcome, EngineCheck]]) -> None:
    faults = []
    for outcome, answer in answers:
        where = f"{outcome['draft']} on {answer.engine} {answer.arch}, tp {answer.tp}"
        said = f"{where}: {answer.error}"
        if answer.verdict != outcome["verdict"]:
            faults.append(f"{said}: {answer.verdict}, not {outcome['verdict']}")
        elif answer.verdict == "REFUSED":
            # The first words: what follows are numbers and lists of the engine's.
            same = own_text(answer.error)[:40] == outcome["error"][:40]
            if not same and outcome["draft"] not in OTHER_TEXT:
                faults.append(f"{said}: not {outcome['error']}")
    assert faults == []
    assert len(answers) > 600
    mixed = [outcome for outcome, _ in answers if "nvfp4-fp8-down" in outcome["draft"]]
    assert len(mixed) == len(FAMILIES) * 10  # on every GPU, in 1 and 2 shards


@pytest.mark.slow
def test_linears_have_the_shapes_that_the_engines_built(
    answers: list[tuple[Outcome, EngineCheck]],
) -> None:
    wrong = [one for outcome, answer in answers for one in parameter_mismatches(outcome, answer)]
    assert wrong == []
    served = [outcome["draft"] for outcome, _ in answers if "LOADS" in outcome["verdict"]]
    assert served.count("broken--kv-head-in-each-shard") == 10  # on every GPU, in 1 and 2 shards
    assert served.count("broken--vocabulary-padded") == 10
    assert len(served) > 400


@pytest.mark.parametrize("name", ["broken--kv-head-in-each-shard", "broken--vocabulary-padded"])
def test_shards_of_heads_have_the_shapes_that_engines_built(folders: Folders, name: str) -> None:
    """What a shard holds whole, and what it is filled up to: on every GPU, in 1 and 2 shards."""
    outcomes = [outcome for outcome in read_outcomes() if outcome["draft"] == name]
    assert len(outcomes) == 10
    for outcome in outcomes:
        answer = predicted(folders / name, outcome)
        assert answer.verdict == outcome["verdict"]
        assert parameter_mismatches(outcome, answer) == []


@pytest.mark.parametrize("name", NOT_READ)
def test_what_is_not_read_no_engine_serves(folders: Folders, name: str) -> None:
    """Of each platform: their selectors and projections have a row for every token."""
    outcomes = [outcome for outcome in read_outcomes() if outcome["draft"] == name]
    assert len(outcomes) == 5
    assert all(outcome["verdict"] != "LOADS" for outcome in outcomes)
    with pytest.raises(CheckpointError, match="draft_vocab_size: expected vocab_size 512, got 256"):
        predicted(folders / name, outcomes[0])


HEADS_THAT_REACH_NOTHING = {
    "eagle3-llama-no-head": ("vllm", "takes the first 256 rows of it for the tokens of d2t"),
    "eagle3-mla-no-head-size-null": ("sglang", "looks its 512 rows up in d2t, which has 256"),
    "eagle3-llama-repeats": ("sglang", "64 of 256 rows of d2t stand for a token for which another"),
    "eagle3-mla-absolute": ("vllm", "d2t holds target ids, and vLLM adds the number of the row"),
    "dflash-no-d2t": ("vllm", "no map d2t is stored"),
    "dflash": ("sglang", "SGLang drops d2t and lm_head"),
    "dspark-no-head": ("vllm", "with its own lm_head and with d2t only"),
    "eagle3-llama-size-other": ("vllm", "declares a draft_vocab_size of 192, and d2t has 256 rows"),
    "dspark-size-null": ("sglang", "SGLang builds the Markov head for the whole vocabulary"),
}


@pytest.mark.parametrize("name", HEADS_THAT_REACH_NOTHING)
def test_heads_that_do_not_reach_the_proposals(folders: Folders, name: str) -> None:
    """Each is what the engine did, on H200 and one GPU; `check` says why."""
    engine, text = HEADS_THAT_REACH_NOTHING[name]
    (outcome,) = (
        one
        for one in read_outcomes()
        if (one["draft"], one["engine"]) == (f"cut--{name}", engine)
        if (one["arch"], one["tp"]) == ("sm90", 1)
    )
    answer = predicted(folders / f"cut--{name}", outcome)
    assert answer.verdict == outcome["verdict"] != "LOADS"
    assert text in (answer.error or "")


@pytest.mark.parametrize(
    ("name", "asked", "verdict", "text"),
    [
        ("fp8-block-split-inputs", "vllm sm90 1", "LOADS", ""),
        ("fp8-block-split-inputs", "vllm sm90 2", "REFUSED", "input_size_per_partition = 192"),
        ("ct-fp8-block-split-rows", "sglang sm90 2", "REFUSED", "output_partition_size = 192"),
        ("qkv-kept-without-alias", "vllm sm90 1", "LOADS BUT WRONG", "from BF16 to F8_E4M3"),
        ("qkv-kept-quark-without-alias", "sglang gfx942 1", "LOADS BUT WRONG", "BF16 to F8_E4M3"),
    ],
)
def test_broken_folders(name: str, asked: str, verdict: str, text: str, folders: Folders) -> None:
    """Everyday, of those that are slow above."""
    engine, arch, tp = asked.split()
    answer = check_draft(
        folders / f"broken--{name}",
        engine=engine,  # type: ignore[arg-type]
        arch=arch,
        tp=int(tp),
        target_layers=NUM_TARGET_LAYERS,
    )
    assert answer.verdict == verdict
    assert text in (answer.error or "")


def test_layers_without_a_known_number_are_named_so(folders: Folders) -> None:
    draft = folders / f"{FORMATS_OF}--fp8-fp8-block-fp8-group"
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    assert "num_target_layers" not in config
    answer = check_draft(draft, engine="vllm", arch="sm90")
    said = " ".join(finding.text + finding.remedy for finding in answer.findings)
    assert "model.layers.N.self_attn" in said
    assert "100000" not in said


def test_a_broken_regular_expression_is_unsure() -> None:
    with pytest.raises(UnsureError, match="no regular expression"):
        exact_or_regex("re:(", "model.fc")


@pytest.mark.parametrize(("engine", "tp"), [("vllm", 3), ("sglang", 8)])
def test_heads_that_the_shards_cannot_share_are_refused(
    engine: EngineName, tp: int, tmp_path: Path
) -> None:
    """Executed with 3, 8 and 16 shards, three families and two engines: 57 of 57 are refused."""
    draft = tiny_eagle3_llama(tmp_path / "d", pruned_vocabulary=True)
    answer = check_draft(draft, engine=engine, arch="sm90", tp=tp)
    assert answer.verdict == "REFUSED"
    assert "total_num_heads % tp_size == 0" in (answer.error or "")
    assert "divides 4" in (answer.remedy or "")


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 0, "desc_act": False, "sym": True}


@pytest.mark.parametrize(
    ("declared", "asked", "why"),
    [
        (None, {"version": "0.99"}, "vLLM 0.99 are not known"),
        (None, {"arch": "sm75"}, "never executed"),
        (GPTQ, {}, ""),
        ({"quant_method": "quark", "surprise": 1}, {}, ""),
        ({"quant_method": "fp8", "activation_scheme": 7}, {"engine": "sglang"}, ""),
        ({"quant_method": "moe_wna16"}, {}, "Loading this declaration was never executed"),
    ],
)
def test_what_was_not_executed_is_unknown(
    declared: dict[str, Any] | None, asked: dict[str, Any], why: str, tmp_path: Path
) -> None:
    config = {"quantization_config": declared} if declared else {}
    draft = tiny_eagle3_llama(tmp_path / "d", pruned_vocabulary=True, config=config)
    answer = check_draft(draft, **{"engine": "vllm", "arch": "sm90"} | asked)  # type: ignore[arg-type]
    assert answer.verdict == "UNKNOWN"
    assert why in " ".join(finding.text for finding in answer.findings)


def test_a_declaration_is_an_object(tmp_path: Path) -> None:
    draft = tiny_eagle3_llama(tmp_path / "d", config={"quantization_config": []})
    with pytest.raises(CheckpointError, match="expected an object with quant_method"):
        check_draft(draft, engine="vllm")


@pytest.mark.parametrize("name", ["backbone.norm.weight", "backbone.self_attn.q_scale"])
def test_names_that_were_not_executed_are_unknown(tmp_path: Path, name: str) -> None:
    draft = tiny_eagle3_llama(tmp_path / "d", pruned_vocabulary=True)
    tensors = read_tensors(draft)
    write_tensors(draft, {**tensors, name: tensors["norm.weight"]}, metadata={"format": "pt"})
    assert check_draft(draft, engine="vllm", arch="sm90").verdict == "UNKNOWN"


BOTH_PLACES = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
"""The target's layers for every runner of every engine, whatever the target's default is."""


def test_a_layer_number_of_the_target_is_unknown(workshop: Workshop) -> None:
    source = workshop.source("eagle3-llama")
    folder = workshop.quantize(
        source, format_recipe("compressed-tensors", "fp8-channel", "fp8-token"), "numbered"
    )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= BOTH_PLACES
    config["quantization_config"]["ignore"].append("model.layers.61.self_attn.o_proj")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    answer = check_draft(folder, engine="vllm", arch="sm90")
    assert answer.verdict == "UNKNOWN"
    assert "counts the draft's layers after the target's" in (answer.error or "")
    for layers, verdict in ((61, "REFUSED"), (60, "LOADS")):  # is it the draft's own layer?
        known = check_draft(folder, engine="vllm", arch="sm90", target_layers=layers)
        assert known.verdict == verdict
    assert check_draft(folder, engine="sglang", arch="sm90", target_layers=61).verdict == "LOADS"


def test_target_layers_agrees_with_config(tmp_path: Path) -> None:
    draft = tiny_eagle3_llama(
        tmp_path / "d", pruned_vocabulary=True, config={"num_target_layers": 61} | BOTH_PLACES
    )
    with pytest.raises(CheckpointError) as caught:
        check_draft(draft, engine="vllm", target_layers=60)
    assert str(caught.value.where).endswith("config.json: num_target_layers")
    assert "a target of 61 decoder layers, --target-layers 60" in caught.value.what
    for layers in (None, 61):
        assert check_draft(draft, engine="vllm", target_layers=layers).verdict == "LOADS"


NO_INPUTS = "TypeError: 'NoneType' object is not subscriptable"
READ_IN_TENSORRT_LLM = {
    ("compressed-tensors", "int4-group128", "weights-only"): ("REFUSED", NO_INPUTS),
    ("compressed-tensors", "fp8-channel", "fp8-static"): ("REFUSED", "inputs_quant_strategy: tens"),
    ("modelopt", "nvfp4", "nvfp4"): ("UNKNOWN", "reads this declaration as NVFP4,"),
    ("quark", "fp8-channel", "fp8-token"): ("LOADS BUT WRONG", "plain numbers without"),
    ("quark", "int4-group128", "weights-only"): ("UNKNOWN", "quark in this form was not read"),
}


@pytest.mark.parametrize(
    ("formats", "expected"), READ_IN_TENSORRT_LLM.items(), ids=lambda value: "-".join(value)
)
def test_what_was_read_of_tensorrt_llm(
    workshop: Workshop, formats: tuple[Any, str, str], expected: tuple[str, str]
) -> None:
    recipe = format_recipe(*formats)
    folder = workshop.quantize(workshop.source("eagle3-llama"), recipe, f"trt-{recipe.name}")
    answer = check_draft(folder, engine="tensorrt-llm")
    verdict, text = expected
    assert (answer.verdict, answer.evidence) == (
        verdict,
        "its public source was read in parts, and it was never executed",
    )
    assert text in (answer.error or "")
    assert '"decoding_type": "Eagle3"' in (answer.launch or "")
    assert "trtllm-serve TARGET --tp_size 1 --config draft.yaml" in (answer.launch or "")


def test_tensorrt_llm_reads_the_side_file_first(workshop: Workshop) -> None:
    recipe = format_recipe("compressed-tensors", "fp8-tensor", "fp8-static")
    folder = workshop.quantize(workshop.source("eagle3-llama"), recipe, "trt-side-file")
    (folder / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": "FP8"}}', encoding="utf-8"
    )
    answer = check_draft(folder, engine="tensorrt-llm", arch="sm90")
    assert answer.verdict == "UNKNOWN"
    assert "reads hf_quant_config.json first" in (answer.error or "")


@pytest.mark.parametrize(
    ("case", "arguments", "code", "parts"),
    [
        ("eagle3-llama--unquantized", ["sglang"], 0, ("LOADS", "unquant", "qkv_proj")),
        ("broken--quark-exclude-bare", ["vllm"], 1, ("LOADS BUT WRONG", "exclude fc so that")),
        ("broken--mla-model-type", ["vllm"], 1, ("REFUSED", "kimi_k2")),
        (
            "broken--mla-model-type",
            ["tensorrt-llm", "--gpu", "gfx950"],
            3,
            ("UNKNOWN", "what to do: try the server there, or take vLLM 0.33.0 or SGLang 0.5.23,"),
        ),
        (
            "broken--o-proj-kept-regex",
            ["sglang"],
            3,
            (
                "Depends on the GPU: LOADS on H200 (sm90), B200 (sm100); REFUSED on MI325X"
                " (gfx942). Name yours with --gpu.\n  why (",
            ),
        ),
        ("nowhere", ["vllm"], 2, ()),
    ],
)
def test_the_command(
    folders: Folders,
    case: str,
    arguments: list[str],
    code: int,
    parts: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", str(folders / case), "--engine", *arguments]) == code
    out = capsys.readouterr().out
    for part in parts:
        assert part in out


def test_check_imports_no_torch(folders: Folders) -> None:
    code = (
        "import sys; from draftquant.scripts.cli import main;"
        " main(['check', sys.argv[1], '--engine', 'vllm']);"
        " sys.exit(not {'torch', 'transformers', 'quark', 'modelopt'}.isdisjoint(sys.modules))"
    )
    folder = str(folders / "broken--nvfp4-global-scales-differ")
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
