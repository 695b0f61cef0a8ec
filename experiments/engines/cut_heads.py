"""Drafts whose head has rows for fewer tokens than the target's vocabulary: of every family.

Each is a tiny draft with the half of the vocabulary, as it was trained, or with one thing changed
that a trainer, a tool or a hand gets wrong. Data, and the edits that make them.
"""

import json
from collections.abc import Callable, Mapping
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
_SHAPE: dict[str, Any] = {"hidden": _HIDDEN, "intermediate": 512, "vocab": VOCAB}
_HEADS: dict[str, Any] = {**_SHAPE, "heads": 8, "kv_heads": 4, "head_dim": 64}
_MLA: dict[str, Any] = {
    **_SHAPE,
    "heads": 4,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_BLOCKS: dict[str, Any] = {**_HEADS, "num_layers": 2}
_BF16 = {"torch_dtype": "bfloat16"}
_LAYERS_OF_BLOCKS, _LAYERS_OF_EAGLE3 = (2, 4, 6), (2, 4, 5)

Build = Callable[[Path], Path]


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


def configure(key: str, value: object) -> Edit:
    """Another value of a key of config.json."""
    return lambda folder: folder.config.update({key: value})


@dataclass(frozen=True, slots=True, kw_only=True)
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
    edit: Edit = lambda _folder: None
    recipe: str | None = None
    reads: tuple[int, ...] = _LAYERS_OF_EAGLE3
    tp: tuple[int, ...] = (1,)


def _eagle3(folder: Path, **changes: Any) -> Path:
    return tiny_eagle3_llama(folder, **_HEADS, pruned_vocabulary=True, **changes)


def _peagle(folder: Path) -> Path:
    return with_mask_hidden(_eagle3(folder), num_features=3 * _HIDDEN)


def _qwen3(folder: Path) -> Path:
    """vLLM's name for layers of Qwen3."""
    named = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
    _eagle3(folder, config=named)
    _add(folder, _head_norms("midlayer."))
    return folder


def _mla(folder: Path) -> Path:
    return tiny_eagle3_mla(folder, **_MLA, pruned_vocabulary=True)


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


def _each(
    family: str, build: Build, names: tuple[str, ...], reads: tuple[int, ...]
) -> tuple[CutHead, ...]:
    return tuple(
        CutHead(
            name=f"{family} {name}".rstrip(),
            what=_WRONG[name][0],
            build=build,
            edit=_WRONG[name][1],
            reads=reads,
            tp=(1,) if name else (1, 2),
        )
        for name in names
    )


def _quantized(
    family: str, build: Build, recipes: tuple[str, ...], reads: tuple[int, ...]
) -> tuple[CutHead, ...]:
    return tuple(
        CutHead(
            name=f"{family} {name}",
            what=f"quantized: {BEYOND[name].summary}",
            build=build,
            recipe=name,
            reads=reads,
            tp=(1, 2),
        )
        for name in recipes
    )


_ALL = tuple(_WRONG)
_HEAD_RECIPES = ("fp8-head", "int4-group128-head")
CUT_HEADS = (
    *_each("eagle3-llama", _eagle3, _ALL, _LAYERS_OF_EAGLE3),
    CutHead(
        name="eagle3-llama no-head size-null",
        what="no lm_head, and draft_vocab_size null: SGLang takes the target's head then",
        build=_eagle3,
        edit=_both(_drop("lm_head"), _NULL),
    ),
    CutHead(
        name="eagle3-llama tied",
        what="tie_word_embeddings is true beside a head of its own",
        build=_eagle3,
        edit=_TIED,
    ),
    *_quantized("eagle3-llama", _eagle3, _HEAD_RECIPES, _LAYERS_OF_EAGLE3),
    CutHead(name="p-eagle", what="drafts in parallel", build=_peagle),
    *_each("eagle3-qwen3", _qwen3, ("", "no-head", "no-d2t"), _LAYERS_OF_EAGLE3),
    *_quantized("eagle3-qwen3", _qwen3, ("fp8-head",), _LAYERS_OF_EAGLE3),
    *_each("eagle3-mla", _mla, _ALL, _LAYERS_OF_EAGLE3),
    CutHead(
        name="eagle3-mla no-head size-null",
        what="no lm_head, and draft_vocab_size null: SGLang takes the target's head then",
        build=_mla,
        edit=_both(_drop("lm_head"), _NULL),
    ),
    *_quantized("eagle3-mla", _mla, _HEAD_RECIPES, _LAYERS_OF_EAGLE3),
    *_each("dflash", _dflash, _ALL, _LAYERS_OF_BLOCKS),
    CutHead(
        name="dflash said",
        what="has_own_lm_head: true",
        build=_dflash,
        edit=_SAID,
        reads=_LAYERS_OF_BLOCKS,
    ),
    CutHead(
        name="dflash no-head said",
        what="has_own_lm_head: true, and no lm_head",
        build=_dflash,
        edit=_both(_drop("lm_head"), _SAID),
        reads=_LAYERS_OF_BLOCKS,
    ),
    *_quantized("dflash", _dflash, _HEAD_RECIPES, _LAYERS_OF_BLOCKS),
    *(
        CutHead(
            name=f"dflash {recipe} said",
            what=f"quantized: {BEYOND[recipe].summary}; has_own_lm_head: true",
            build=_dflash,
            edit=_SAID,
            recipe=recipe,
            reads=_LAYERS_OF_BLOCKS,
        )
        for recipe in _HEAD_RECIPES
    ),
    CutHead(
        name="dflash2",
        what="a candidate selector, whose codebooks have a row for each token",
        build=lambda folder: _dflash(folder, kind="dflash2"),
        reads=_LAYERS_OF_BLOCKS,
    ),
    *_each("dspark", _dspark, _ALL, _LAYERS_OF_BLOCKS),
    *_quantized("dspark", _dspark, ("fp8-head",), _LAYERS_OF_BLOCKS),
    CutHead(
        name="speculators eagle3-llama",
        what="in the layout of speculators",
        build=_of_speculators(tiny_speculators_eagle3, _eagle3),
    ),
    CutHead(
        name="speculators eagle3-qwen3",
        what="in the layout of speculators",
        build=_of_speculators(_speculators_qwen3, _qwen3),
    ),
    CutHead(
        name="speculators p-eagle",
        what="in the layout of speculators",
        build=_of_speculators(_speculators_peagle, _peagle),
    ),
    CutHead(
        name="speculators dflash",
        what="in the layout of speculators",
        build=_of_speculators(tiny_speculators_dflash, _dflash),
        reads=_LAYERS_OF_EAGLE3,
    ),
    CutHead(
        name="speculators dflash no-head",
        what="in the layout of speculators, without lm_head",
        build=_of_speculators(tiny_speculators_dflash, _dflash),
        edit=_drop("lm_head"),
        reads=_LAYERS_OF_EAGLE3,
    ),
    CutHead(
        name="speculators dspark",
        what="in the layout of speculators",
        build=_of_speculators(_speculators_dspark, _dspark),
        reads=_LAYERS_OF_EAGLE3,
    ),
)
