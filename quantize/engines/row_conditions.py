"""Conditions of rows: which facts they may name, and whether they hold.

The table `when` of a row has fields of one record -> what they are: a value; a list that has it;
`{ not = [...] }`, which has it not; or `{ multiple_of = n }`. True means that there is a value,
false that there is none, or that it is 0 or empty. A row counts whose `when` holds, and whose
`unless` does not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .linear_scheme import Signature


@dataclass(frozen=True, kw_only=True)
class Facts(Signature):
    """What rows of rules.toml ask for and quote: of each question the facts that it has.

    Texts and numbers are those of the folder; engines' own errors and remedies come in words.
    """

    engine: str = ""
    method: str | None = None
    arch: str = ""
    is_amd: bool = False
    is_mla: bool = False
    is_tied: bool = False
    is_whole_model: bool = False
    drafts_blocks: bool = False
    prunes_vocabulary: bool = False
    name: str = ""
    remedy: str = ""

    # A linear in one shard: `quantized_linear`.
    leaf: str = ""
    prefix: str = ""
    suffix: str = ""
    is_fused: bool = False
    is_replicated: bool = False
    is_mixed: bool = False
    rows: int = 0
    columns: int = 0
    cut_group: bool = False
    cut_parts: bool = False
    cut_block: str | None = None
    block_side: str = ""
    concatenated: str | None = None
    is_marlin: bool = False
    renames_block_scales: bool = False
    has_own_head: bool = False

    # A tensor where an engine expects another: `Walk._in_place`, `_experts`, `strangers`.
    module: str = ""
    in_engine: str = ""
    stored_dtype: str = ""
    wanted_dtype: str = ""
    stored: str = ""
    shape: str = ""
    is_other_shape: bool = False
    is_joined: bool = False
    is_bytes: bool = False
    is_stored: bool = False
    has_companions: bool = False
    unknown_tensors: str = ""
    floats_into_fp8: str = ""
    refused: str | None = None
    half: int = 0

    # Tables, heads and shards: `folder_findings`.
    built: int = 0
    stored_rows: int | None = None
    mapped_rows: int | None = None
    vocabulary: int = 0
    is_cut: bool = False
    is_declared: bool = False
    is_of_other_rows: bool = False
    has_map: bool = False
    has_other_map: bool = False
    has_linears: bool = False
    has_draft_vocab_size: bool = False
    uneven_heads: str | None = None
    heads: int = 0
    uneven: str | None = None
    tp: int = 1

    # config.json and a declaration: `form_problem`, `declaration_problem`, `config_problem`.
    model_type: str | None = None
    of_speculators: bool = False
    lacks_heads: bool = False
    says_nothing: bool = False
    null_method: bool = False
    spelled: str | None = None
    algorithm: str = ""
    in_capitals: str = ""
    is_fp4: bool = False
    is_nested: bool = False
    capability: int | None = None
    absent_key: str | None = None
    absent_name: str | None = None
    names_mask: bool = False
    head_is_whole: bool = False
    head_rows: int | None = None
    taken: str = ""
    is_read: bool = False
    is_ordinary: bool = False
    as_draft: str = ""
    drops_head: bool = False
    is_parallel: bool = False
    is_float16_only: bool = False
    torch_dtype: str | None = None
    too_many_layers: bool = False
    needs_draft_vocab_size: bool = False

    # The rope: `rope_facts`.
    place: str = ""
    section: str = ""
    by_layer: bool = False
    null_theta: bool = False
    kind: str = ""
    is_known: bool = False
    usual: str = ""
    clashes: bool = False
    lacks: str | None = None
    pairs: int = 0
    unequal: bool = False


Condition = Mapping[str, Any]


def counts(row: Mapping[str, Any], facts: object) -> bool:
    """Whether the facts meet the condition of a row, and not its exception."""
    excepted = "unless" in row and holds(row["unless"], facts)
    return holds(row.get("when", {}), facts) and not excepted


def holds(condition: Condition, facts: object) -> bool:
    """Whether each field of a record is what a condition wants."""
    return all(_meets(getattr(facts, name), wanted) for name, wanted in condition.items())


def _meets(fact: Any, wanted: Any) -> bool:
    match wanted:
        case bool():
            return bool(fact) is wanted
        case list():
            return fact in wanted
        case {"not": others}:
            return fact not in others
        case {"multiple_of": step}:
            return bool(fact % step == 0)
    return bool(fact == wanted)
