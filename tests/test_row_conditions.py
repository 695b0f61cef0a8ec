"""Rows of engines and pairs name typed facts, and those that no other test asks come true here."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast, get_type_hints

import pytest
from draftquant.quantize.engines import contract
from draftquant.quantize.pairing import pair_facts

ENGINES, PAIRS = Path(contract.__file__).parent, Path(pair_facts.__file__).parent
PLACEHOLDER = re.compile(r"(?<!\{)\{(\w+)")


def table(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


RULES = [row for rows in table(ENGINES / "rules.toml").values() for row in rows]
SCHEMES = [
    {"when": scheme}
    for name, layouts in table(ENGINES / "schemes.toml").items()
    if name not in ("usual", "refused")
    for rows in layouts.values()
    for row in rows
    for scheme in row["schemes"]
]
TABLES: dict[type, list[Mapping[str, Any]]] = {
    contract.Facts: RULES,
    contract.Signature: SCHEMES,
    pair_facts.PairFacts: [*table(PAIRS / "findings.toml").values()],
}


def fits(wanted: Any, kind: Any) -> bool:
    """A value of the field's type; true and false also ask whether there is one."""
    match wanted:
        case list() if wanted:
            return all(fits(each, kind) for each in wanted)
        case {"not": list(others)} if len(wanted) == 1:
            return fits(others, kind)
        case {"multiple_of": int()} if len(wanted) == 1:
            return kind is int
    return isinstance(wanted, bool | kind)


@pytest.mark.parametrize("record", TABLES)
def test_conditions_and_sentences_name_typed_facts(record: type) -> None:
    kinds = get_type_hints(record)
    for row in TABLES[record]:
        for condition in (row.get("when", {}), row.get("unless", {})):
            assert all(fits(wanted, kinds[key]) for key, wanted in condition.items()), row
        texts = [*row.get("says", ())[1:], row.get("text", ""), row.get("remedy", "")]
        assert {*PLACEHOLDER.findall(" ".join(texts))} <= kinds.keys(), row


def test_every_fact_is_asked_or_quoted() -> None:
    asked = " ".join(map(str, TABLES.values()))
    names = {field.name for record in TABLES for field in fields(record)}
    assert {name for name in names if not re.search(rf"\b{name}\b", asked)} == set()


BLOCK = {"layout": "modelopt", "granularity": "block"}
RARE: list[tuple[str, dict[str, Any], str]] = [
    ("vllm linear", {**BLOCK, "columns": 64}, "blocks of ModelOpt's have 128"),
    ("vllm linear", {**BLOCK, "columns": 128, "cut_parts": True}, "no whole blocks of 128"),
    ("vllm linear", {"leaf": "kv_b_proj", "layout": "quark", "dtype": "mxfp4"}, "kv_b_proj apart"),
    ("sglang linear", {"layout": "compressed-tensors", "zero_points": True, "rows": 65}, "65 rows"),
    ("vllm floats", {"name": "x", "stored_dtype": "BF16"}, "x is stored as BF16"),
    ("sglang codes", {"name": "x"}, "x belongs to quantized values"),
    ("sglang shared", {"is_stored": True, "has_companions": True}, "which is quantized"),
    ("vllm shards", {"uneven": "width = 7", "tp": 2}, "width = 7 is not divisible by 2"),
    ("sglang declaration", {"method": "modelopt", "algorithm": "MIXED_PRECISION", "arch": "sm80"},
     "never executed on sm80"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "facts", "text"), RARE)
def test_what_no_folder_asks(asked: str, facts: dict[str, Any], text: str) -> None:
    engine, about = cast(Any, asked.split())
    (found,) = contract.all_rules(engine, "", about, contract.Facts(**facts))
    assert text in found.text
