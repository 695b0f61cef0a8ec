"""What `check` says of folders kept as rows of headers, beside what the engines did with them."""

import copy
import functools
import typing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import folder_rows
import pytest
from asked_pairs import check_draft
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.drafts.architectures import KNOWN_TO_BOTH, OTHER_NAMES
from draftquant.quantize.engines.contract import Verdict
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.lints.catalogue import config_changes, find_lints
from draftquant.recipes import DraftQuantError
from tiny import edit_json, tiny_eagle3_llama
from tiny_dflash import tiny_dflash
from tiny_dspark import tiny_dspark
from tiny_mla import tiny_eagle3_mla

PAGE = Path(__file__).parents[1] / "experiments" / "engines" / "FOREIGN.md"
INSIDE = "MTP layers in targets"
NO_DRAFTS = {"qwen2-head-dim", "qwen2-odd-heads", "dflash2"}
"""The engines read two widths of a head; and a selector has a row for every token: status 2."""
MANY = ("drawn at random", "names and model types")
"""Of these rows every second is everyday."""
UNKNOWN = {
    "made by tools": 181,
    "drawn at random": 95,
    "imitated by hand": 370,
    "heads of fewer rows": 34,
    "scales of a KV cache": 16,
    "names and model types": 27,
    "broken on purpose": 158,
    "of Laguna": 2,
    "MTP layers": 4,
}
"""Everyday answers that `check` leaves to the engine."""
SERVED = {
    # It loads, and unpacks a tensor as a pair in its first forward: `llama.py:502,621`.
    ("no-layers", "sglang"): "LOADS BUT WRONG",
    # Its speculator is refused: `v1/worker/gpu/spec_decode/dflash/speculator.py:67`.
    ("dflash-no-mask", "vllm"): "REFUSED",
    # It fills fc, and uses it only where the target's states are wider: `llama_eagle3.py`.
    ("no-aux-with-fc", "sglang"): "LOADS BUT WRONG",
    # Its norms have other names, and AMD's GPUs lack the kernel.
    ("two-layers-int4", "sglang"): "REFUSED",
}
"""What an engine does after it has loaded."""


@functools.cache
def rows_of(name: str) -> dict[str, Mapping[str, Any]]:
    return {row["draft"]: row for row in folder_rows.read_rows(folder_rows.FILES[name])}


def compared(rows: Sequence[Mapping[str, Any]], folder: Path) -> tuple[Counter[str], list[str]]:
    """How many answers of `check` are right or UNKNOWN, and those that are neither."""
    counts, wrong = Counter[str](), list[str]()
    for row in rows:
        for asked, told, said in folder_rows.predictions(row, folder):
            verdict = SERVED.get((row["draft"], said.engine), told)
            counts["right" if said.verdict == verdict else said.verdict] += 1
            where = f"{row['draft']} {asked}"
            if said.verdict == "UNKNOWN" != verdict:
                continue
            if said.verdict != verdict or not folder_rows.is_reason(row, asked, said):
                wrong.append(f"{where}: {said.verdict} ({said.error}), not {verdict}")
            modules = {*said.linears}
            modules -= set(row.get("modules", {}).get(said.engine, modules))
            # SGLang takes GLM's shared expert for one more of the routed ones.
            if {name for name in modules if ".shared_experts." not in name}:
                wrong.append(f"{where}: {modules} is not built")
    return counts, wrong


def fewer(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of each answer one question of each engine and number of shards."""
    answers = {
        verdict: {(asked.split()[0], asked[-2:]): asked for asked in reversed(questions)}.values()
        for verdict, questions in row["answers"].items()
    }
    return {**row, "answers": answers}


@pytest.mark.parametrize("name", [name for name in folder_rows.FILES if name != INSIDE])
def test_check_says_what_the_engines_did(name: str, tmp_path: Path) -> None:
    rows = [fewer(row) for draft, row in rows_of(name).items() if draft not in NO_DRAFTS]
    counts, wrong = compared(rows[::2] if name in MANY else rows, tmp_path)
    assert (wrong, counts["UNKNOWN"]) == ([], UNKNOWN.get(name, 0))


@pytest.mark.slow
@pytest.mark.parametrize("name", folder_rows.FILES)
def test_every_answer_is_counted_by_the_page(name: str, tmp_path: Path) -> None:
    rows = [row for draft, row in rows_of(name).items() if draft not in NO_DRAFTS]
    counts, wrong = compared(rows, tmp_path)
    assert wrong == []
    known, unknown = counts["right"], counts["UNKNOWN"]
    page = PAGE.read_text(encoding="utf-8")
    assert f"| {name} | {known + unknown} | {known} | {unknown} | 0 |" in page.splitlines()


@pytest.mark.parametrize(
    ("form", "unknown"), [("qwen quark: ", 14), ("next ct-fp8: ", 12), ("mimo awq: p", 2)]
)
def test_a_layer_in_its_target_is_taken_as_it_was(form: str, unknown: int, tmp_path: Path) -> None:
    rows = [row for draft, row in rows_of(INSIDE).items() if draft.startswith(form)][:12]
    counts, wrong = compared(rows, tmp_path)
    assert (wrong, counts["UNKNOWN"]) == ([], unknown)


def test_a_draft_that_is_none_is_not_read(tmp_path: Path) -> None:
    row = rows_of("heads of fewer rows")["dflash2"]
    assert "LOADS" not in row["answers"]
    with pytest.raises(DraftQuantError, match="draft_vocab_size: expected vocab_size 512, got 256"):
        list(folder_rows.predictions(row, tmp_path))


JUNK: tuple[Any, ...] = (None, True, -1, 0, 1.5, "", "x", [], {}, [None], {"a": 1}, [{}, {}])


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    keys: Sequence[Any] = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def test_a_declaration_of_any_shape_is_answered_or_refused(tmp_path: Path) -> None:
    small = [row for row in rows_of("made by tools").values() if len(row["answers"]) == 1]
    for seed in range(10):
        random = Random(seed)
        row = copy.deepcopy(random.choice(small))
        for _ in range(5):
            declared = row["config"].get("quantization_config") or row["config"]
            container, key = random.choice(list(places(declared)))
            container[key] = copy.deepcopy(random.choice(JUNK))
            with suppress(DraftQuantError):
                said = {one.verdict for *_, one in folder_rows.predictions(row, tmp_path)}
                assert set() < said <= set(typing.get_args(Verdict))


QUARK = "global_quant_config"


@pytest.mark.parametrize(
    "place",
    ["layer_type_quant_config", "layer_quant_config", f"{QUARK} output_tensors", f"{QUARK} bias"],
)
def test_what_no_engine_was_asked_is_left_to_it(place: str, tmp_path: Path) -> None:
    row = copy.deepcopy(rows_of("made by tools")["llama-512/quark--model-uint4_wo_64"])
    *section, key = place.split()
    declared = row["config"]["quantization_config"]
    functools.reduce(dict.__getitem__, section, declared)[key] = {"Linear": {"dtype": "int8"}}
    answers = folder_rows.predictions(row, tmp_path)
    assert {said.verdict for _, told, said in answers if told == "LOADS"} == {"UNKNOWN"}


def test_fix_config_writes_the_name_that_both_engines_have(tmp_path: Path) -> None:
    builders: dict[str, Any] = {
        "LlamaForCausalLMEagle3": tiny_eagle3_llama,
        "Eagle3DeepseekV2ForCausalLM": tiny_eagle3_mla,
        "DFlashDraftModel": tiny_dflash,
        "Qwen3DSparkModel": tiny_dspark,
        "DFlash2DraftModel": functools.partial(tiny_dflash, kind="dflash2"),
    }
    folders = {wanted: make(tmp_path / wanted) for wanted, make in builders.items()}
    for name, wanted in OTHER_NAMES.items():
        if wanted in KNOWN_TO_BOTH:
            edit_json(folders[wanted] / "config.json", architectures=[name])
            draft = read_draft(Checkpoint.open(folders[wanted]))
            assert config_changes(find_lints(draft))["architectures"] == [wanted]


def test_launch_lines_turn_the_cache_on(tmp_path: Path) -> None:
    row = rows_of("scales of a KV cache")["e3 compressed-tensors"]
    vllm, sglang = (said.launch for *_, said in folder_rows.predictions(row, tmp_path))
    assert '"kv_cache_dtype": "fp8"' in str(vllm)
    assert "--speculative-draft-kv-cache-dtype fp8_e4m3" in str(sglang)
    plain = check_draft(tiny_eagle3_llama(tmp_path / "plain"), engine="vllm", arch="sm90").launch
    assert "kv_cache_dtype" not in str(plain)
