"""Builders of tiny drafts with real names, byte for byte reproducible, written without safetensors.

A tensor is a `Stored`: safetensors dtype, shape and raw little-endian bytes. Tests that need a
broken file change these and write again.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tiny_shapes import Shapes, eagle3

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FloatArray = npt.NDArray[np.float32]


class Stored(NamedTuple):
    """One tensor as it lies in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Drawn:
    """Random tensors of one dtype, in the order in which they are asked for."""

    def __init__(self, seed: int, dtype: str = "BF16") -> None:
        self.rng, self.dtype = np.random.default_rng(seed), dtype

    def normal(self, *shape: int) -> FloatArray:
        return self.rng.standard_normal(shape, dtype=np.float32)

    def tensors(self, shapes: Shapes, *, vocab: int = 0, around: int = 1) -> dict[str, Stored]:
        """Linears and biases near 0, norms near `around`, and a random half of the vocabulary."""
        found: dict[str, Stored] = {}
        kept = np.empty(0)
        for name, shape in shapes.items():
            if name == "d2t":
                kept = np.sort(self.rng.permutation(vocab)[: shape[0]])
                found[name] = Stored("I64", shape, (kept - np.arange(shape[0])).tobytes())
            elif name == "t2d":
                found[name] = Stored("BOOL", shape, np.isin(np.arange(vocab), kept).tobytes())
            elif name.endswith("correction_bias"):
                found[name] = store(0.1 * self.normal(*shape), "F32")
            elif name.endswith("base_kernel"):
                found[name] = store(self.normal(*shape) / 4 + [[[1]], [[0]]], self.dtype)
            elif len(shape) == 1 and not name.endswith(".bias"):
                found[name] = store(around + 0.1 * self.normal(*shape), self.dtype)
            else:
                found[name] = store(self.normal(*shape) / shape[-1] ** 0.5, self.dtype)
        return found


def size_keys(
    *,
    hidden: int = 64,
    intermediate: int = 96,
    num_layers: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = 16,
    vocab: int = 96,
    dtype: str = "BF16",
) -> dict[str, Any]:
    """The keys of config.json that every kind of draft has."""
    return {
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype],
        "vocab_size": vocab,
    }


def publish(
    folder: Path,
    keys: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    *,
    sharded: bool = False,
    tokenizer: bool = True,
) -> Path:
    """config.json, weights, and two tokenizer files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
    if tokenizer:
        (folder / "tokenizer.json").write_text('{"version": "1.0"}\n', encoding="utf-8")
        (folder / "tokenizer_config.json").write_text("{}\n", encoding="utf-8")
    write_tensors(folder, tensors, sharded=sharded, metadata={"format": "pt"})
    return folder


def tiny_eagle3_llama(
    folder: Path,
    *,
    seed: int = 0,
    prefix: str = "midlayer.",
    sharded: bool = False,
    embed: bool = True,
    head: bool = True,
    pruned_vocabulary: bool = False,
    normed: bool = False,
    dtype: str = "BF16",
    config: Mapping[str, Any] | None = None,
    **sizes: int,
) -> Path:
    """Write a tiny EAGLE-3 Llama draft: config.json, weights and two tokenizer files.

    Args:
        folder: created; its parent must exist.
        prefix: of layer 0 ("midlayer.", "layers.0.", "model.layers.0."). Layers after it are
            "layers.1." and so on. With a "model." prefix, fc, norm and embed_tokens have it too.
        sharded: two shards and an index.
        embed: with embed_tokens. head: with lm_head.
        pruned_vocabulary: half of the vocabulary, with d2t and t2d.
        normed: with q_norm and k_norm.
        dtype: "BF16", "F16" or "F32", of every weight.
        config: overrides of config.json.
        sizes: see `size_keys`.
    """
    keys = size_keys(dtype=dtype, **sizes)
    vocab = keys["vocab_size"]
    keys |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": vocab // 2 if pruned_vocabulary else vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
        "model_type": "llama",
    }
    cut = pruned_vocabulary
    has = optional(embed_tokens=embed, lm_head=head, d2t=cut, t2d=cut, qk_norm=normed)
    tensors = Drawn(seed, dtype).tensors(eagle3(keys, has, prefix), vocab=vocab)
    return publish(folder, keys | dict(config or {}), tensors, sharded=sharded)


def optional(**asked: bool) -> set[str]:
    """The names of those that are asked for."""
    return {name for name, is_asked in asked.items() if is_asked}


def store(values: npt.NDArray[Any], dtype: str) -> Stored:
    """Round float values to BF16 (nearest even), F16 or F32 and keep their bytes."""
    if dtype == "BF16":
        return Stored(dtype, values.shape, bf16_bits(values).tobytes())
    kind = {"F16": np.float16, "F32": np.float32}[dtype]
    return Stored(dtype, values.shape, values.astype(kind).tobytes())


def bf16_bits(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """The upper half of the float32 bits, rounded to nearest, ties to even; finite values only."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def values_of(tensor: Stored) -> FloatArray:
    """The exact values of a BF16, F16 or F32 tensor in float32."""
    if tensor.dtype == "BF16":
        bits = np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(tensor.shape)
    kind = {"F16": np.float16, "F32": np.float32}[tensor.dtype]
    return np.frombuffer(tensor.data, kind).astype(np.float32).reshape(tensor.shape)


def write_tensors(
    folder: Path,
    tensors: Mapping[str, Stored],
    *,
    sharded: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write model.safetensors, or two shards (even and odd names) and their index."""
    if not sharded:
        write_safetensors(folder / SINGLE_FILE, tensors, metadata)
        return
    names = sorted(tensors)
    files = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, members in files.items():
        write_safetensors(folder / file, {name: tensors[name] for name in members}, metadata)
    index = {
        "metadata": {"total_size": sum(len(tensor.data) for tensor in tensors.values())},
        "weight_map": {name: file for file, members in files.items() for name in members},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_safetensors(
    path: Path, tensors: Mapping[str, Stored], metadata: Mapping[str, str] | None = None
) -> None:
    """One safetensors file, tensors in the order given."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        stop = offset + len(tensor.data)
        kind = {"dtype": tensor.dtype, "shape": list(tensor.shape)}
        header[name] = {**kind, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            stream.write(tensor.data)


def read_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of every safetensors file of a folder, by name."""
    found: dict[str, Stored] = {}
    for path in sorted(folder.glob("*.safetensors")):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:start]).items():
            if name != "__metadata__":
                first, stop = (start + offset for offset in entry["data_offsets"])
                found[name] = Stored(entry["dtype"], tuple(entry["shape"]), content[first:stop])
    return found


def fused_with(module: str) -> list[str]:
    """The modules that engines fuse with one, itself included."""
    parent, _, leaf = module.rpartition(".")
    groups = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    return [f"{parent}.{m}" for m in next((g for g in groups if leaf in g), (leaf,))]


def fused_absmax(tensors: Mapping[str, Stored], module: str) -> float:
    """Largest magnitude of a weight and of those that engines fuse with it."""
    weights = [values_of(tensors[f"{member}.weight"]) for member in fused_with(module)]
    return max(float(np.abs(weight).max()) for weight in weights)


def config_of(folder: Path) -> dict[str, Any]:
    """The config.json of a folder."""
    return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def edit_json(path: Path, **changes: Any) -> None:
    """Replace keys of a JSON object on disk; a change to None removes the key."""
    value = json.loads(path.read_text(encoding="utf-8")) | changes
    kept = {key: own for key, own in value.items() if own is not None}
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def change(folder: Path, **tensors: Stored | None) -> None:
    """Replace, add or (None) remove tensors; `__` in a name stands for a dot."""
    changed = read_tensors(folder) | {name.replace("__", "."): t for name, t in tensors.items()}
    write_tensors(folder, {name: t for name, t in changed.items() if t is not None})
