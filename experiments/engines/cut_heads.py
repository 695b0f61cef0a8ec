"""Drafts whose head has rows for fewer tokens than the target's vocabulary: of every family.

Each is a tiny draft with the half of the vocabulary, as it was trained, or with one thing changed
that a trainer, a tool or a hand gets wrong. Data, and the edits that make them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from heads import BEYOND
from tiny import Stored, edit_json, read_tensors, store, tiny_eagle3_llama, write_tensors
from tiny_dflash import tiny_dflash
from tiny_dspark import tiny_dspark
from tiny_llama import with_mask_hidden
from tiny_mla import tiny_eagle3_mla
from tiny_speculators import tiny_speculators_dflash, tiny_speculators_eagle3

_HIDDEN, VOCAB, ROWS = 256, 512, 256
SHAPE: dict[str, Any] = {"hidden": _HIDDEN, "intermediate": 512, "vocab": VOCAB}
# 512 rows of q, 256 of k and of v: each shard of two is whole blocks of 128.
HEADS: dict[str, Any] = {**SHAPE, "heads": 8, "kv_heads": 4, "head_dim": 64}
# As in the published drafts, kv_a_proj_with_mqa alone is not whole blocks of 128: 192 rows for 576.
MLA: dict[str, Any] = {
    **SHAPE, "heads": 4, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_BLOCKS: dict[str, Any] = {**HEADS, "num_layers": 2}
_BF16 = {"torch_dtype": "bfloat16"}
_LAYERS_OF_BLOCKS, _LAYERS_OF_EAGLE3 = (2, 4, 6), (2, 4, 5)

Build = Callable[[Path], Path]
Layers = tuple[int, ...]


@dataclass(slots=True)
class Folder:
    """A draft that is about to be edited."""

    config: dict[str, Any]
    tensors: dict[str, Stored]

    def drop(self, *prefixes: str) -> None:
        """Leave out every tensor whose name starts so."""
        for name in [name for name in self.tensors if name.startswith(prefixes)]:
            del self.tensors[name]


Edit = Callable[[Folder], object]


def edit_folder(place: Path, edit: Edit) -> None:
    """Edit a draft in place."""
    config = json.loads((place / "config.json").read_text(encoding="utf-8"))
    folder = Folder(config, read_tensors(place))
    edit(folder)
    (place / "config.json").write_text(json.dumps(folder.config, indent=2) + "\n", "utf-8")
    write_tensors(place, folder.tensors, metadata={"format": "pt"})


def _as_built(_folder: Folder) -> None:
    """Nothing."""


def configure(key: str, value: object) -> Edit:
    """Another value of a key of config.json."""
    return lambda folder: folder.config.update({key: value})


@dataclass(frozen=True, slots=True)
class CutHead:
    """One folder.

    Attributes:
        name: "family what".
        what: what is special about it.
        build: writes the draft, with rows for half of the tokens.
        edit: of what was built; the head and the map that were built say what it should propose.
        recipe: of `heads`, by which it is quantized before the edit; None = as it was trained.
        reads: the target's layers whose inputs it reads.
        tp: numbers of tensor-parallel shards to load it in.
    """

    name: str
    what: str
    build: Build
    edit: Edit = _as_built
    recipe: str | None = None
    reads: tuple[int, ...] = _LAYERS_OF_EAGLE3
    tp: tuple[int, ...] = (1,)


def _eagle3(folder: Path, **changes: Any) -> Path:
    return tiny_eagle3_llama(folder, **HEADS, pruned_vocabulary=True, **changes)


def _peagle(folder: Path) -> Path:
    return with_mask_hidden(_eagle3(folder), num_features=3 * _HIDDEN)


def _qwen3(folder: Path) -> Path:
    """vLLM's name for layers of Qwen3."""
    named = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
    _eagle3(folder, config=named)
    _add(folder, _head_norms("midlayer."))
    return folder


def _mla(folder: Path) -> Path:
    return tiny_eagle3_mla(folder, **MLA, pruned_vocabulary=True)


def _dflash(folder: Path, **changes: Any) -> Path:
    return tiny_dflash(folder, **_BLOCKS, pruned_vocabulary=True, config=_BF16, **changes)


def _dspark(folder: Path, **changes: Any) -> Path:
    return tiny_dspark(folder, **_BLOCKS, rank=128, pruned_vocabulary=True, config=_BF16, **changes)


def _of_speculators(build: Callable[..., Path], plain: Build, **keys: Any) -> Build:
    """The config.json of the package over tensors of our sizes."""

    def made(folder: Path) -> Path:
        inner = plain(folder.with_name(f"{folder.name}-plain"))
        config = json.loads((inner / "config.json").read_text(encoding="utf-8"))
        sizes = ("hidden_size", "intermediate_size", "head_dim", "num_attention_heads")
        layers = {key: config[key] for key in (*sizes, "num_key_value_heads", "vocab_size")}
        build(folder, config={"draft_vocab_size": ROWS, **keys}, layers=layers)
        tensors = {
            name.replace("midlayer.", "layers.0."): tensor
            for name, tensor in read_tensors(inner).items()
        }
        write_tensors(folder, tensors, metadata={"format": "pt"})
        return folder

    return made


def _speculators_qwen3(folder: Path, **changes: Any) -> Path:
    return tiny_speculators_eagle3(folder, layer_type="qwen3", **changes)


def _speculators_dspark(folder: Path, **changes: Any) -> Path:
    tiny_speculators_dflash(folder, **changes)
    edit_json(
        folder / "config.json",
        architectures=["DSparkSpeculator"],
        speculators_model_type="dspark",
        markov_rank=128,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
    return folder


def _speculators_peagle(folder: Path, **changes: Any) -> Path:
    tiny_speculators_eagle3(folder, **changes)
    edit_json(
        folder / "config.json",
        architectures=["PEagleSpeculator"],
        speculators_model_type="peagle",
        mask_token_id=VOCAB - 1,
    )
    return folder


def _head_norms(prefix: str) -> Mapping[str, Stored]:
    rng = np.random.default_rng(5)
    return {
        f"{prefix}self_attn.{name}.weight": store(
            1 + 0.1 * rng.standard_normal(64, dtype=np.float32), "BF16"
        )
        for name in ("q_norm", "k_norm")
    }


def _add(folder: Path, more: Mapping[str, Stored]) -> None:
    write_tensors(folder, read_tensors(folder) | dict(more), metadata={"format": "pt"})


def _offsets(kept: np.ndarray[Any, np.dtype[np.int64]]) -> Stored:
    return Stored("I64", kept.shape, (kept - np.arange(len(kept))).astype(np.int64).tobytes())


def target_ids(tensors: Mapping[str, Stored]) -> list[int]:
    """Of the rows of a head, by the map that stands beside it."""
    offsets = np.frombuffer(tensors["d2t"].data, np.int64)
    return [int(i) for i in offsets + np.arange(len(offsets))]


def _drop(*names: str) -> Edit:
    return lambda folder: folder.drop(*names)


def _size(rows: int | None) -> Edit:
    return configure("draft_vocab_size", rows)


def _without_size(folder: Folder) -> None:
    del folder.config["draft_vocab_size"]


def _both(*edits: Edit) -> Edit:
    def edit(folder: Folder) -> None:
        for each in edits:
            each(folder)

    return edit


def _int32(folder: Folder) -> None:
    offsets = np.frombuffer(folder.tensors["d2t"].data, np.int64).astype(np.int32)
    folder.tensors["d2t"] = Stored("I32", offsets.shape, offsets.tobytes())


def _absolute(folder: Folder) -> None:
    kept = np.array(target_ids(folder.tensors), dtype=np.int64)
    folder.tensors["d2t"] = Stored("I64", kept.shape, kept.tobytes())


def _repeats(folder: Folder) -> None:
    """The last quarter of the rows stand for the first token."""
    kept = np.array(target_ids(folder.tensors), dtype=np.int64)
    kept[-ROWS // 4 :] = kept[0]
    folder.tensors["d2t"] = _offsets(kept)


def _short_head(folder: Folder) -> None:
    head = folder.tensors["lm_head.weight"]
    rows, width = ROWS - 64, head.shape[1]
    folder.tensors["lm_head.weight"] = Stored(
        head.dtype, (rows, width), head.data[: rows * width * 2]
    )


def _other_mask(folder: Folder) -> None:
    marked = ~np.frombuffer(folder.tensors["t2d"].data, np.bool_)
    folder.tensors["t2d"] = Stored("BOOL", marked.shape, marked.tobytes())


_SAID = configure("has_own_lm_head", True)
_TIED = configure("tie_word_embeddings", True)
_NULL, _LESS = _size(None), _size(ROWS - 64)
_WRONG: Mapping[str, tuple[str, Edit]] = {
    "": ("as it was trained: d2t in int64, t2d beside it", lambda _folder: None),
    "no-t2d": ("no t2d", _drop("t2d")),
    "int32": ("d2t in int32", _int32),
    "no-head": ("no lm_head: the target's is to be cut by the engine", _drop("lm_head")),
    "no-d2t": ("no d2t", _drop("d2t", "t2d")),
    "size-null": ("draft_vocab_size is null", _NULL),
    "size-absent": ("no draft_vocab_size", _without_size),
    "size-other": ("draft_vocab_size says fewer rows than are stored", _LESS),
    "head-short": ("lm_head has fewer rows than d2t and draft_vocab_size", _short_head),
    "repeats": ("a quarter of the rows of d2t stand for one token", _repeats),
    "absolute": ("d2t holds target ids, not offsets", _absolute),
    "t2d-contradicts": ("t2d marks the other half of the tokens", _other_mask),
}


def _each(family: str, build: Build, names: Sequence[str], reads: Layers) -> Iterator[CutHead]:
    for name in names:
        what, edit = _WRONG[name]
        tp = (1,) if name else (1, 2)
        yield CutHead(f"{family} {name}".rstrip(), what, build, edit, None, reads, tp)


def _quantized(
    family: str, build: Build, names: Sequence[str], reads: Layers, edit: Edit | None = None
) -> Iterator[CutHead]:
    for name in names:
        said = "; has_own_lm_head: true" if edit else ""
        what = f"quantized: {BEYOND[name].summary}{said}"
        whole, tp = f"{family} {name}{' said' if edit else ''}", (1,) if edit else (1, 2)
        yield CutHead(whole, what, build, edit or _as_built, name, reads, tp)


_ALL, _HEAD_RECIPES = tuple(_WRONG), ("fp8-head", "int4-group128-head")
_E, _B = _LAYERS_OF_EAGLE3, _LAYERS_OF_BLOCKS
_NEITHER = "no lm_head, and draft_vocab_size null: SGLang takes the target's head then"
_OF_SPECULATORS, _NO_HEAD = "in the layout of speculators", _drop("lm_head")
_SPECULATORS: Mapping[str, tuple[Callable[..., Path], Build]] = {
    "eagle3-llama": (tiny_speculators_eagle3, _eagle3),
    "eagle3-qwen3": (_speculators_qwen3, _qwen3),
    "p-eagle": (_speculators_peagle, _peagle),
    "dflash": (tiny_speculators_dflash, _dflash),
    "dspark": (_speculators_dspark, _dspark),
}
_IN_SPECULATORS = {name: _of_speculators(*both) for name, both in _SPECULATORS.items()}


def _dflash2(folder: Path) -> Path:
    return _dflash(folder, kind="dflash2")


CUT_HEADS = (
    *_each("eagle3-llama", _eagle3, _ALL, _E),
    CutHead("eagle3-llama no-head size-null", _NEITHER, _eagle3, _both(_NO_HEAD, _NULL)),
    CutHead("eagle3-llama tied", "tie_word_embeddings is true beside a head of its own", _eagle3,
            _TIED),
    *_quantized("eagle3-llama", _eagle3, _HEAD_RECIPES, _E),
    CutHead("p-eagle", "drafts in parallel", _peagle),
    *_each("eagle3-qwen3", _qwen3, ("", "no-head", "no-d2t"), _E),
    *_quantized("eagle3-qwen3", _qwen3, ("fp8-head",), _E),
    *_each("eagle3-mla", _mla, _ALL, _E),
    CutHead("eagle3-mla no-head size-null", _NEITHER, _mla, _both(_NO_HEAD, _NULL)),
    *_quantized("eagle3-mla", _mla, _HEAD_RECIPES, _E),
    *_each("dflash", _dflash, _ALL, _B),
    CutHead("dflash said", "has_own_lm_head: true", _dflash, _SAID, reads=_B),
    CutHead("dflash no-head said", "has_own_lm_head: true, and no lm_head", _dflash,
            _both(_NO_HEAD, _SAID), reads=_B),
    *_quantized("dflash", _dflash, _HEAD_RECIPES, _B),
    *_quantized("dflash", _dflash, _HEAD_RECIPES, _B, _SAID),
    CutHead("dflash2", "a candidate selector, whose codebooks have a row for each token", _dflash2,
            reads=_B),
    *_each("dspark", _dspark, _ALL, _B),
    *_quantized("dspark", _dspark, ("fp8-head",), _B),
    *(CutHead(f"speculators {name}", _OF_SPECULATORS, build)
      for name, build in _IN_SPECULATORS.items()),
    CutHead("speculators dflash no-head", f"{_OF_SPECULATORS}, without lm_head",
            _IN_SPECULATORS["dflash"], _NO_HEAD),
)  # fmt: skip
