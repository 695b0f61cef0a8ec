"""Drafts whose vocabulary is cut: what is written in each family, and what cannot be cut."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from by_recipe import draft_of
from cuts import IDS, cut, target
from draftquant.quantize.verify import verify
from draftquant.recipes.errors import CheckpointError, PlanError
from tiny import Stored, config_of, read_tensors, tiny_eagle3_llama
from tiny_dflash import tiny_dflash
from tiny_dspark import tiny_dspark
from tiny_mla import tiny_eagle3_mla
from tiny_mtp import tiny_deepseek_mtp
from tiny_speculators import tiny_speculators_eagle3
from verify_cases import edit

pytestmark = pytest.mark.usefixtures("one_thread")


def rows(tensor: Stored) -> list[bytes]:
    width = len(tensor.data) // tensor.shape[0]
    return [tensor.data[i : i + width] for i in range(0, len(tensor.data), width)]


def integers(tensor: Stored) -> list[int]:
    assert tensor.dtype == "I64"
    return [int(i) for i in np.frombuffer(tensor.data, "<i8")]


FAMILIES: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "eagle3-llama": (tiny_eagle3_llama, ("lm_head.weight",)),
    "eagle3-mla": (tiny_eagle3_mla, ("lm_head.weight",)),
    "dflash": (partial(tiny_dflash, head=True, sharded=True), ("lm_head.weight",)),
    "dspark": (partial(tiny_dspark, head=True), ("lm_head.weight", "markov_head.markov_w2.weight")),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_rows_keep_their_bytes_and_all_else_is_as_it_was(family: str, tmp_path: Path) -> None:
    build, with_rows = FAMILIES[family]
    source, out = build(tmp_path / "draft"), tmp_path / "cut"
    before = read_tensors(source)
    vocabulary = before[with_rows[0]].shape[0]
    ids = [i for i in IDS if i < vocabulary]
    report = cut(source, out, ids)
    after = read_tensors(out)
    for name in with_rows:
        name = next(stored for stored in before if stored.endswith(name))
        assert rows(after[name]) == [rows(before[name])[i] for i in ids]
    assert after.keys() == before.keys() | {"d2t", "t2d"}
    assert [i + d for i, d in enumerate(integers(after["d2t"]))] == ids
    assert after["t2d"].dtype == "BOOL"
    assert np.flatnonzero(np.frombuffer(after["t2d"].data, np.bool_)).tolist() == ids
    changed = {name for name in before if before[name] != after[name]}
    assert {name.rpartition("layers.")[2] for name in changed} == set(with_rows)
    was, now = (config_of(f) for f in (source, out))
    assert now == {**was, "draft_vocab_size": len(ids)}
    assert draft_of(out).geometry.draft_vocab_size == len(ids)
    assert verify(out, source).ok
    assert (report.size, report.vocabulary, report.missing) == (len(ids), vocabulary, 0)


def test_rows_of_a_cut_draft_are_chosen_among_its_own(tmp_path: Path) -> None:
    source = tiny_eagle3_llama(tmp_path / "draft", pruned_vocabulary=True)
    before = read_tensors(source)
    own = [i + d for i, d in enumerate(integers(before["d2t"]))]
    own[5], own[24] = own[24], own[5]  # nothing says that rows ascend
    offsets = (np.array(own) - np.arange(len(own))).astype("<i8").tobytes()
    edit(source, lambda tensors: tensors.update(d2t=tensors["d2t"]._replace(data=offsets)))
    asked = sorted({*own[5:25], *IDS})
    report = cut(source, tmp_path / "cut", asked)
    kept = [i for i in asked if i in own]
    after = read_tensors(tmp_path / "cut")
    head = rows(before["lm_head.weight"])
    assert rows(after["lm_head.weight"]) == [head[own.index(i)] for i in kept]
    assert (report.size, report.missing) == (len(kept), len(asked) - len(kept))
    assert verify(tmp_path / "cut", source).ok


def test_a_draft_without_a_head_is_given_rows_of_its_target(tmp_path: Path) -> None:
    source, model = tiny_dflash(tmp_path / "draft"), target(tmp_path / "target")
    with pytest.raises(PlanError, match="stores no head"):
        cut(source, tmp_path / "cut")
    assert cut(source, tmp_path / "cut", target=model).head_from == "model.lm_head.weight"
    head = rows(read_tensors(model)["model.lm_head.weight"])
    assert rows(read_tensors(tmp_path / "cut")["lm_head.weight"]) == [head[i] for i in IDS]
    assert verify(tmp_path / "cut", source).ok
    assert verify(tmp_path / "cut", source, target=model).ok
    edit(model, lambda t: t.update({"model.lm_head.weight": t["model.embed_tokens.weight"]}))
    assert not verify(tmp_path / "cut", source, target=model).ok
    with pytest.raises(PlanError, match="expected at least 96 rows of 64, got 96 of 32"):
        cut(source, tmp_path / "other", target=target(tmp_path / "narrow", hidden=32))
    padded = cut(source, tmp_path / "of-padded", target=target(tmp_path / "padded", vocab=128))
    assert (padded.size, padded.vocabulary) == (len(IDS), 96)


def repeated(folder: Path) -> Path:
    """Two rows for one token."""
    tiny_eagle3_llama(folder, pruned_vocabulary=True)
    offsets = np.array(integers(read_tensors(folder)["d2t"]), "<i8")
    offsets[1] = offsets[0] - 1
    edit(folder, lambda t: t.update(d2t=Stored("I64", offsets.shape, offsets.tobytes())))
    return folder


def absolute(folder: Path) -> Path:
    """Target ids where engines read offsets."""
    tiny_eagle3_llama(folder, pruned_vocabulary=True)
    ids = Stored("I64", (48,), np.arange(48, dtype="<i8").tobytes())
    mask = Stored("BOOL", (96,), (np.arange(96) < 48).tobytes())
    edit(folder, lambda tensors: tensors.update(d2t=ids, t2d=mask))
    return folder


TIED = {"tie_word_embeddings": True}
EAGLE3 = tiny_eagle3_llama
WRONG: dict[str, tuple[Callable[[Path], Path], Sequence[int]]] = {
    "more than the vocabulary": (EAGLE3, range(97)),
    "all of them": (EAGLE3, range(96)),
    "twice": (EAGLE3, [*IDS, IDS[-1]]),
    "fewer than a tree takes": (EAGLE3, IDS[:9]),
    "a map that repeats": (repeated, IDS),
    "a map of ids": (absolute, IDS),
    "tied": (partial(EAGLE3, config=TIED), IDS),
    "tied layers": (partial(tiny_speculators_eagle3, layers=TIED), IDS),
    "mtp": (tiny_deepseek_mtp, IDS),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_cut(name: str, tmp_path: Path) -> None:
    build, ids = WRONG[name]
    source = build(tmp_path / "draft")
    with pytest.raises((PlanError, CheckpointError)):
        cut(source, tmp_path / "cut", ids)
    assert not (tmp_path / "cut").exists()
