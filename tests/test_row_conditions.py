"""Rows of engines and pairs: a fact that nobody tells, or nobody asks for, is an error."""

import tomllib
from pathlib import Path

import pytest
from draftquant.quantize.engines import contract
from draftquant.quantize.engines.versions import ENGINES

SCHEMES = Path(contract.__file__).with_name("schemes.toml")


def test_a_row_names_facts_of_its_question() -> None:
    with pytest.raises(KeyError, match="vocabulary"):  # which the sentence quotes
        ENGINES["vllm"].rule("map", is_absolute=False, outside="96")
    with pytest.raises(KeyError, match="is_absolute"):
        ENGINES["vllm"].rule("map", vocabulary=96)


def test_schemes_have_fields_of_signatures_with_values_of_their_types() -> None:
    tables = tomllib.loads(SCHEMES.read_text(encoding="utf-8"))
    known = vars(contract.Signature())
    for name, layouts in tables.items():
        rows = (row for each in layouts.values() for row in each) if name in tables["usual"] else ()
        for scheme in (each for row in rows for each in row["schemes"]):
            for key, wanted in scheme.items():
                values = wanted if isinstance(wanted, list) else [wanted]
                assert {type(known[key])} == {*map(type, values)}, scheme
