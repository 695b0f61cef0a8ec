"""Rows of engines and pairs: they name typed facts, and each that no other test asks comes true."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from draftquant.quantize import pairing
from draftquant.quantize.engines import linear_scheme, row_conditions, versions
from draftquant.quantize.pairing.pair_facts import PairFacts

ENGINES = Path(row_conditions.__file__).parent
PLACEHOLDER = re.compile(r"(?<!\{)\{(\w+)")


def rows(path: Path) -> Iterator[Mapping[str, Any]]:
    for found in tomllib.loads(path.read_text(encoding="utf-8")).values():
        yield from found if isinstance(found, list) else [found]


def schemes() -> Iterator[Mapping[str, Any]]:
    table = tomllib.loads((ENGINES / "schemes.toml").read_text(encoding="utf-8"))
    for name in ("vllm", "sglang", "tensorrt-llm", "concatenated"):
        for of_layout in table[name].values():
            for row in of_layout:
                yield from ({"when": scheme} for scheme in row["schemes"])


TABLES: dict[str, tuple[type, list[Mapping[str, Any]]]] = {
    "rules": (row_conditions.Facts, [*rows(ENGINES / "rules.toml")]),
    "schemes": (linear_scheme.Signature, [*schemes()]),
    "findings": (PairFacts, [*rows(Path(str(pairing.__file__)).with_name("findings.toml"))]),
}


def fits(wanted: Any, kind: Any) -> bool:
    """A value of the field's own type; true and false also ask whether there is one."""
    match wanted:
        case bool():
            return True
        case list():
            return bool(wanted) and all(fits(each, kind) for each in wanted)
        case {"not": list(others), **more}:
            return not more and fits(others, kind)
        case {"multiple_of": int(), **more}:
            return not more and kind is int
    return isinstance(wanted, kind)


@pytest.mark.parametrize("name", TABLES)
def test_conditions_and_sentences_name_typed_facts(name: str) -> None:
    record, table = TABLES[name]
    kinds = get_type_hints(record)
    assert table
    for row in table:
        for condition in (row.get("when", {}), row.get("unless", {})):
            wrong = {key for key, wanted in condition.items() if not fits(wanted, kinds[key])}
            assert not wrong, row
        texts = [*row.get("says", ())[1:], row.get("text", ""), row.get("remedy", "")]
        assert {*PLACEHOLDER.findall(" ".join(texts))} <= kinds.keys(), row


def test_every_fact_is_asked_or_quoted() -> None:
    asked = " ".join(str(table) for _, table in TABLES.values())
    names = {field.name for record, _ in TABLES.values() for field in fields(record)}
    assert {name for name in names if not re.search(rf"\b{name}\b", asked)} == set()


BLOCK = {"layout": "modelopt", "granularity": "block"}
RARE: list[tuple[str, str, dict[str, Any], str]] = [
    ("vllm", "linear", {**BLOCK, "columns": 64}, "blocks of ModelOpt's have 128"),
    ("vllm", "linear", {**BLOCK, "columns": 128, "cut_parts": True}, "no whole blocks of 128"),
    ("vllm", "linear", {"leaf": "kv_b_proj", "layout": "quark", "dtype": "mxfp4"}, "takes kv_b_p"),
    ("sglang", "linear", {"layout": "compressed-tensors", "zero_points": True, "rows": 65},
     "has 65 rows"),
    ("vllm", "floats", {"name": "x", "stored_dtype": "BF16"}, "x is stored as BF16, and vLLM"),
    ("sglang", "codes", {"name": "x"}, "x belongs to quantized values"),
    ("vllm", "shards", {"uneven": "intermediate_size = 7", "tp": 2}, "7 is not divisible by 2"),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "about", "facts", "text"), RARE)
def test_what_no_folder_asks_is_said_too(
    engine: Any, about: str, facts: dict[str, Any], text: str
) -> None:
    found = versions.choose(engine).rule(about, **facts)
    assert found is not None
    assert text in found.text
