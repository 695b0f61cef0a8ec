"""Every lint has a draft that triggers it and nothing else; drafts that engines agree on have none.

What the lints say of vLLM 0.33 and SGLang 0.5.23 was read in, and mostly loaded with, their code.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import draftquant.api as dq
import numpy as np
import pytest
from asked_pairs import check_draft
from by_recipe import draft_of
from draftquant.quantize.drafts import Draft
from draftquant.quantize.drafts.config_reader import KEY, SECTION
from draftquant.quantize.drafts.family import Lint
from draftquant.quantize.drafts.recognition import plain_config
from draftquant.quantize.lints.catalogue import find_lints, fixed_config
from draftquant.quantize.lints.value_lints import HalfRatio, check_vocabulary_map, half_ratios
from draftquant.recipes.errors import CheckpointError
from draftquant.scripts.cli import main
from draftquant.scripts.dev.docs.lints import messages
from tiny import Stored, config_of, read_tensors, tiny_eagle3_llama, values_of, write_tensors
from tiny_dflash import tiny_dflash, tiny_laguna
from tiny_dspark import tiny_dspark, tiny_dspark_mla
from tiny_mla import tiny_eagle3_mla
from tiny_speculators import tiny_speculators_dflash, tiny_speculators_eagle3
from told import check_told

PORTABLE: dict[str, Any] = {KEY: [2, 4, 5], SECTION: {KEY: [1, 3, 4]}}
BY_LAYER = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
ABSENT = object()
FULL, SLIDING = ["full_attention"] * 2, ["sliding_attention"] * 2


def set_keys(folder: Path, **changes: Any) -> Path:
    """Change keys of config.json; None is written as null, ABSENT removes the key."""
    path = folder / "config.json"
    keys = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({k: v for k, v in keys.items() if v is not ABSENT}), "utf-8")
    return folder


def set_tensors(folder: Path, **tensors: Stored | None) -> Path:
    changed = read_tensors(folder) | tensors
    write_tensors(folder, {name: t for name, t in changed.items() if t is not None})
    return folder


def renamed(folder: Path, old: str, new: str) -> Path:
    found = read_tensors(folder)
    write_tensors(folder, {name.replace(old, new, 1): t for name, t in found.items()})
    return folder


# Drafts that every engine reads in the same way, one per family.


def llama(folder: Path, config: dict[str, Any] | None = None, **options: Any) -> Path:
    options = {"embed": False} | options
    return tiny_eagle3_llama(folder, config=PORTABLE | (config or {}), **options)


def mla(folder: Path, config: dict[str, Any] | None = None, **options: Any) -> Path:
    options = {"embed": False} | options
    keys = PORTABLE | {"rope_theta": 10000.0} | (config or {})
    return tiny_eagle3_mla(folder, config=keys, **options)


def dflash(folder: Path, nested: dict[str, Any] | None = None, **config: Any) -> Path:
    tiny_speculators_dflash(folder, embed=False, pruned_vocabulary=False)
    plain = dict(plain_config(config_of(folder), folder))
    plain |= {"torch_dtype": "bfloat16"} | config
    plain["dflash_config"].pop("causal")
    plain["dflash_config"] |= nested or {}
    (folder / "config.json").write_text(json.dumps(plain), encoding="utf-8")
    return folder


def speculators_eagle3(folder: Path, **config: Any) -> Path:
    """Read by vLLM alone."""
    config = {"norm_before_residual": False, **config}
    return tiny_speculators_eagle3(folder, embed=False, config=config)


def test_a_clean_draft_has_no_lints(tmp_path: Path) -> None:
    for name, make in {
        "llama, default layers": lambda to: llama(to, {KEY: None, SECTION: None}),
        "llama, pruned": lambda to: llama(to, pruned_vocabulary=True),
        "llama, no head": lambda to: llama(to, {"draft_vocab_size": None}, head=False),
        "llama, theta 50000 of another trainer": lambda to: llama(to, {"rope_theta": 50000.0}),
        "llama, yarn with mscale": lambda to: llama(
            to, {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}
        ),
        "float16": lambda to: llama(to, dtype="F16"),
        "mla, layers from 2": lambda to: mla(to, {KEY: [3, 5, 6], SECTION: {KEY: [3, 5, 6]}}),
        "mla, no head": lambda to: set_keys(mla(to, head=False), draft_vocab_size=ABSENT),
        "dflash": dflash,
        "dflash, own causality": lambda to: dflash(to, is_causal=True, layer_types=FULL),
        "dflash, layer ids twice": lambda to: dflash(to, **{KEY: [2, 4, 5]}),
    }.items():
        assert find_lints(draft_of(make(tmp_path / name))) == (), name


# One trigger per lint, or several. What a draft in the speculators layout has besides is left out.


def offsets(*values: int) -> Stored:
    return Stored("I64", (len(values),), np.array(values, "<i8").tobytes())


def pruned(to: Path, d2t: Stored, *, kept: list[int] | None = None, **keys: Any) -> Path:
    """A vocabulary of 12 pruned to as many ids as d2t has; t2d marks `kept`."""
    size = d2t.shape[0]
    llama(to, {"draft_vocab_size": size} | keys, vocab=12)
    head = read_tensors(to)["lm_head.weight"]
    rows = head._replace(shape=(size, 64), data=head.data[: size * 128])
    t2d = None if kept is None else Stored("BOOL", (12,), bytes(i in kept for i in range(12)))
    return set_tensors(to, d2t=d2t, t2d=t2d, **{"lm_head.weight": rows})


LAST_STATE = {"use_aux_hidden_state": False}


def dflash2(folder: Path, dtype: str = "BF16", own: dict[str, Any] | None = None) -> Path:
    config = {"torch_dtype": {"BF16": "bfloat16", "F16": "float16"}[dtype]}
    return tiny_dflash(folder, kind="dflash2", dtype=dtype, num_layers=1, config=config, own=own)


TRIGGERS: dict[str, list[Callable[[Path], Path]]] = {
    "rope-base": [
        lambda to: mla(to, {"rope_theta": 50000.0}),
        lambda to: llama(to, {"rope_theta": 50000.0, "_torchspec_version": "0.1"}),
    ],
    "rope-injected": [lambda to: llama(to, {"rope_scaling": YARN})],
    "rope-theta-missing": [lambda to: set_keys(llama(to), rope_theta=ABSENT)],
    "rope-unreplayed": [lambda to: llama(to, {"rope_scaling": {"rope_type": "longrope"}})],
    "rope-unlike": [
        lambda to: llama(to, {"partial_rotary_factor": 0.5}),
        lambda to: dflash(to, rope_parameters={"rope_theta": 5e5, "partial_rotary_factor": 0.25}),
        lambda to: llama(to, {"rope_scaling": YARN | {"attention_factor": 1.5}}),
    ],
    "rope-by-layer": [
        lambda to: llama(to, {"rope_parameters": BY_LAYER}),
        lambda to: dflash(to, rope_scaling=BY_LAYER, rope_parameters=None),
    ],
    "aux-layer-ids": [
        lambda to: llama(to, {KEY: None}),
        lambda to: llama(to, {SECTION: {KEY: [2, 4, 5]}}),
        lambda to: mla(to, {KEY: None, SECTION: {KEY: [2, 4, 5]}}),
    ],
    "aux-layer-ids-empty": [
        lambda to: llama(to, {KEY: None, SECTION: {KEY: []}}),
        lambda to: mla(to, {KEY: None, SECTION: {KEY: []}}),
    ],
    "last-hidden-state": [
        lambda to: set_tensors(llama(to, {KEY: None, SECTION: LAST_STATE}), **{"fc.weight": None})
    ],
    "layers-of-target": [lambda to: llama(to, {"num_hidden_layers": 24})],
    "draft-vocab-size-missing": [
        lambda to: llama(to, {"draft_vocab_size": None}),
        lambda to: set_keys(mla(to), draft_vocab_size=ABSENT),
    ],
    "lm-head-missing": [
        lambda to: llama(to, head=False),
        lambda to: llama(to, head=False, pruned_vocabulary=True),
    ],
    "head-tied": [lambda to: llama(to, {"tie_word_embeddings": True})],
    "d2t-absolute": [lambda to: pruned(to, offsets(0, 2, 5), kept=[0, 2, 5])],
    "d2t-duplicates": [lambda to: pruned(to, offsets(2, 1, 5), kept=[2, 7])],
    "d2t-against-t2d": [lambda to: pruned(to, offsets(1, 1, 4), kept=[1, 2, 7])],
    "pruned-head": [lambda to: pruned(to, offsets(1, 1, 4), _torchspec_version="0.1")],
    "norm-before-residual-missing": [lambda to: speculators_eagle3(to, norm_before_residual=None)],
    "norm-before-residual": [
        lambda to: llama(to, {"norm_before_residual": True}),
        lambda to: speculators_eagle3(to, norm_before_residual=True),
    ],
    "norm-output": [lambda to: llama(to, {"norm_output": True})],
    "eagle3-sliding": [lambda to: llama(to, {"layer_types": SLIDING[:1], "sliding_window": 64})],
    "modelopt-double-norm": [
        lambda to: llama(to, {SECTION: {KEY: [1, 3, 4], "next_layer_regular": True}})
    ],
    "dflash-block-size-missing": [lambda to: dflash(to, {"block_size": None})],
    "dflash-sliding": [
        lambda to: dflash(to, layer_types=["full_attention", *SLIDING[:1]], sliding_window=64)
    ],
    "dflash-causal": [
        lambda to: dflash(to, {"causal": True}, layer_types=None),
        lambda to: dflash(to, {"causal": False}, layer_types=SLIDING, sliding_window=64),
    ],
    "dflash-use-swa": [
        lambda to: dflash(to, {"use_swa": True, "causal": True, "swa_window_size": 7}),
        lambda to: dflash(to, {"use_swa": True}, layer_types=None, sliding_window=7),
    ],
    "dflash-speculators-causal": [
        lambda to: tiny_speculators_dflash(
            to, embed=False,
            layers={"layer_types": ["full_attention", *SLIDING[:1]], "sliding_window": 64},
        )
    ],
    "dflash2-float16": [lambda to: dflash2(to, "F16")],
    "dflash2-embedding-scale": [lambda to: dflash2(to, own={"input_embedding_scale": 0.5})],
    "laguna-rope": [
        lambda to: set_keys(tiny_laguna(to), rope_parameters=None, rope_theta=500000.0)
    ],
    "dspark-keys-nested": [
        lambda to: tiny_dspark(
            to, layout="specforge", num_layers=1, config={"torch_dtype": "bfloat16"}
        )
    ],
    "dspark-mla-block-size": [lambda to: tiny_dspark_mla(to, config={"block_size": None})],
    "model-type": [
        lambda to: mla(to, {"model_type": "deepseek_v3"}),
        lambda to: dflash(to, model_type="dflash"),
    ],
    "architecture-name": [
        lambda to: llama(to, {"architectures": ["Eagle3LlamaForCausalLM"]}),
        lambda to: llama(to, {"architectures": ["LlamaForCausalLM"]}),
    ],
    "dtype-missing": [lambda to: set_keys(llama(to), torch_dtype=ABSENT)],
    "dtype-mismatch": [lambda to: llama(to, {"dtype": "float32"})],
    "dtype-mixed": [
        lambda to: set_tensors(
            llama(to), **{"fc.weight": Stored("F16", (64, 192), bytes(64 * 192 * 2))}
        )
    ],
    "misspelt-key": [
        lambda to: set_keys(
            llama(to), norm_before_residual=False, norm_output=ABSENT, norm_outputs=True
        )
    ],
    "embed-tokens": [lambda to: llama(to, embed=True), lambda to: mla(to, embed=True)],
}  # fmt: skip


@pytest.mark.parametrize("name", TRIGGERS)
def test_a_trigger_gives_its_lint_and_a_fix_settles_it(name: str, tmp_path: Path) -> None:
    said: list[str] = []
    for case, trigger in enumerate(TRIGGERS[name]):
        folder = trigger(tmp_path / str(case))
        (lint,) = find_lints(draft_of(folder))
        assert lint.name == name
        said.append(f"{lint.level}: {lint.cause}\n{lint.remedy}: {json.dumps(lint.fix)}")
        for a in (check_draft(folder, engine="vllm"), check_draft(folder, engine="sglang")):
            said.append(f"{a.title}: {a.verdict}, {len(a.notes)} note(s) {a.error or ''}")
        if lint.fix:
            check_fix(folder, lint)
    check_told("lints", {name: "\n".join(said)})


def check_fix(folder: Path, lint: Lint) -> None:
    before = draft_of(folder)
    config = before.checkpoint.config
    text = json.dumps(config)
    fixed = fixed_config(config, lint.fix)
    assert json.dumps(config) == text
    assert [key for key in fixed if key in config] == list(config)
    (folder / "config.json").write_text(json.dumps(fixed), encoding="utf-8")
    after = draft_of(folder)
    assert find_lints(after) == ()
    assert computed(after) == computed(before)
    assert after.rows == before.rows


def test_every_lint_has_a_trigger() -> None:
    named = {message.name for message in messages()}  # as the page of all lints reads them
    assert named == set(TRIGGERS)


def computed(draft: Draft) -> dict[str, Any]:
    """What the maths of a draft follow from."""
    assert dataclasses.is_dataclass(draft.geometry)
    found = dataclasses.asdict(draft.geometry)
    if draft.family.name == "dflash":  # spelled in several ways
        layers: Any = draft.geometry
        del found["causal"], found["layer_types"]
        indices = range(layers.num_layers)
        found["layers"] = [(layers.is_causal(i), layers.is_sliding(i)) for i in indices]
    return found


@pytest.mark.parametrize("d2t", [(0, 0, 10), (0, -2, 0), (2**63 - 1, 0, -(2**63)), (3, 5, 11)])
def test_d2t_out_of_range(d2t: tuple[int, ...], tmp_path: Path) -> None:
    """What is said is kept in told/lints.txt: the last one holds target ids where engines add."""
    draft = draft_of(pruned(tmp_path / "draft", offsets(*d2t)))
    for check in (check_vocabulary_map, find_lints):
        with pytest.raises(CheckpointError):
            check(draft)
    with pytest.raises(CheckpointError):
        dq.plan(tmp_path / "draft", "fp8-ptpc")


# Halves of the concat input


def test_ratio_of_halves_by_hand(tmp_path: Path) -> None:
    """Of layer 0; with eight heads of 16 o_proj is as wide, but reads attention output."""
    folder = tiny_eagle3_llama(tmp_path / "draft", heads=8, num_layers=2)
    tensors, found = read_tensors(folder), half_ratios(draft_of(folder))
    assert [ratio.name for ratio in found] == [f"midlayer.self_attn.{x}_proj.weight" for x in "kqv"]
    for ratio in found:
        rows = abs(values_of(tensors[ratio.name]))
        low, high = rows[:, :64].max(axis=1).mean(), rows[:, 64:].max(axis=1).mean()
        assert ratio.ratio == pytest.approx(high / low, rel=1e-6)
        assert ratio.num_rows == len(rows)


def test_limit_of_harm() -> None:
    for ratio, harmful in {4.0: True, 3.996: False, 0.25: True, 0.2503: False}.items():
        assert HalfRatio(name="q", ratio=ratio, num_rows=1).harmful is harmful


def test_inspect_says_of_how_many_rows_it_looked(tmp_path: Path) -> None:
    """Of 256 of 640 rows, and of 64: kept in told/lints.txt."""
    assert main(["inspect", str(llama(tmp_path / "wide", heads=20, head_dim=32))]) == 0
