"""A target as a draft meets it: what its config.json, its headers and its side files say.

Of a target of hundreds of shards only headers are read, and of one whose weights are not there (a
Hub id, of which the JSON files alone are fetched) the names that its index lists.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...recipes.errors import short
from ..errors import CheckpointError
from ..files.checkpoint import CONFIG_FILE, INDEX_FILE, Checkpoint, read_json_object
from ..files.hub import no_target
from ..files.safetensors_header import TensorInfo
from ..files.subtree import mtp_layers
from ..stored.parts import COMPANIONS, quantized_looking
from .rotation import Rotation

_TEXT_SECTIONS = ("text_config", "llm_config")  # of multimodal targets
_SIZES = ("num_hidden_layers", "vocab_size", "hidden_size")
_DIVIDED = {
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 0,
    "moe_intermediate_size": 0,
}
"""What engines split over GPUs, and its least; a model of experts alone has no width of its own."""
_DECLARATIONS = ("quantization_config", "compression_config")
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""How many MTP layers a target says that it has, in the spellings of DeepSeek, Qwen and others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One target.

    Attributes:
        folder: where its files lie. named: as a launch line calls it.
        config: the parsed config.json. text: the keys of its language model.
        num_layers: decoder layers. vocab_size: rows of its embedding. hidden_size: width of one
            layer's output.
        checkpoint: headers of all shards; None where the weights are not there.
        names: of its tensors; empty where neither shards nor an index are there.
    """

    folder: Path
    named: str
    config: Mapping[str, Any]
    text: Mapping[str, Any]
    num_layers: int
    vocab_size: int
    hidden_size: int
    checkpoint: Checkpoint | None
    names: frozenset[str]

    @classmethod
    def read(cls, folder: Path, named: str | None = None) -> "Target":
        """Read config.json, the index and the headers.

        Raises:
            CheckpointError: there is no config.json, it is not that of a causal language model, or
                the index and the shards contradict each other.
        """
        where = folder / CONFIG_FILE
        config = read_json_object(where, no_target(folder))
        sections = (config.get(name) for name in _TEXT_SECTIONS)
        inner = next((section for section in sections if isinstance(section, Mapping)), {})
        text = {**config, **inner}
        sizes = [_size(text, key, where) for key in _SIZES]
        _check_divided(text, where)
        _check_declaration(text, where)
        checkpoint, names = _tensors(folder)
        return cls(
            folder=folder,
            named=named or str(folder),
            config=config,
            text=text,
            num_layers=sizes[0],
            vocab_size=sizes[1],
            hidden_size=sizes[2],
            checkpoint=checkpoint,
            names=names,
        )

    @property
    def dtype(self) -> str | None:
        """The dtype that config.json names; None = none."""
        return declared_dtype(self.text)

    @property
    def rotation(self) -> Rotation:
        """How positions are rotated, and how many it is made for."""
        return Rotation.of(self.text, self.folder / CONFIG_FILE)

    @property
    def declaration(self) -> Mapping[str, Any] | None:
        """Its quantization_config; None = it declares none in config.json."""
        first, second = _DECLARATIONS
        said = self.text.get(first, self.text.get(second))
        return said if isinstance(said, Mapping) else None

    @property
    def quantization(self) -> str | None:
        """The quant_method that it declares, as written; None = it declares none."""
        if self.declaration is None:
            return None
        said = self.declaration
        return str(said.get("quant_method") or said.get("quant_algo") or "without a quant_method")

    @property
    def cache_dtype(self) -> str | None:
        """The dtype of the KV cache that its quantization_config declares; None = none.

        Read as `get_kv_cache_quant_algo_string` of vLLM 0.33 (`utils/torch_utils.py`) reads it.
        """
        said = self.declaration or {}
        inner = said.get("quantization")
        algorithm = said.get("kv_cache_quant_algo")
        if algorithm is None and isinstance(inner, Mapping):
            algorithm = inner.get("kv_cache_quant_algo")
        if isinstance(algorithm, str):
            return algorithm.lower()
        scheme = said.get("kv_cache_scheme")
        if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8:
            return "fp8" if scheme.get("type") == "float" else "int8"
        return None

    @property
    def promised_mtp_layers(self) -> int:
        """How many MTP layers its config.json says that it has."""
        said = (self.text.get(key) for key in _MTP_KEYS)
        return next((number for number in said if type(number) is int and number > 0), 0)

    @property
    def stored_mtp_layers(self) -> tuple[str, ...]:
        """Prefixes of the MTP layers that it stores."""
        return mtp_layers(_with_weights(self.names))

    def is_stored_quantized(self, table: str) -> bool | None:
        """Whether its lm_head or embed_tokens is stored quantized; None = not known.

        Those of a layer, as DeepSeek's MTP layer repeats them, do not count.
        """
        if not self.names:
            return None
        own = [name for name in self.names if f".{table}." in f".{name}" and ".layers." not in name]
        if any(name.rpartition(".")[2] in COMPANIONS for name in own):
            return True
        if self.checkpoint is None:
            return None if self.declaration is not None else False
        return bool(quantized_looking(self.checkpoint.tensors[name] for name in own))

    def tensor(self, name: str) -> TensorInfo | None:
        """Where a tensor lies; None where it is not there, or the weights are not."""
        return None if self.checkpoint is None else self.checkpoint.tensors.get(name)


def declared_dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype that a config.json names, in the key of transformers 5 or 4; None = none."""
    said = config.get("dtype") or config.get("torch_dtype")
    return said.removeprefix("torch.") if isinstance(said, str) else None


def _with_weights(names: frozenset[str]) -> frozenset[str]:
    """Also `X.weight` for each `X.weight_packed` and the like: a layer is found by a weight."""
    modules = {name.rpartition(".")[0] for name in names if name.rpartition(".")[2] in COMPANIONS}
    return names | {f"{module}.weight" for module in modules}


def _tensors(folder: Path) -> tuple[Checkpoint | None, frozenset[str]]:
    """Headers and names; names alone where the index is there and no shard is."""
    if any(folder.glob("*.safetensors")):
        checkpoint = Checkpoint.open(folder, is_target=True)
        return checkpoint, frozenset(checkpoint.tensors)
    if not (folder / INDEX_FILE).exists():
        return None, frozenset()
    listed = read_json_object(folder / INDEX_FILE, "download the index again").get("weight_map")
    if not isinstance(listed, dict) or not listed:
        where = folder / INDEX_FILE
        raise CheckpointError(where, "weight_map is missing or empty", fix="export the index again")
    return None, frozenset(listed)


def _check_divided(config: Mapping[str, Any], where: Path) -> None:
    """What engines divide among GPUs is a number, or a list of one for each layer, or not said."""
    for key, least in _DIVIDED.items():
        value = config.get(key)
        if value is None or isinstance(value, list) or (type(value) is int and value >= least):
            continue
        raise CheckpointError(
            where,
            f"{key}: expected a whole number of at least {least}, got {short(value)}",
            fix="give the config.json that the model came with",
        )


def _check_declaration(config: Mapping[str, Any], where: Path) -> None:
    for key in _DECLARATIONS:
        value = config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise CheckpointError(
                where,
                f"{key}: expected an object, got {short(value)}",
                fix="give the config.json that the model came with",
            )


def _size(config: Mapping[str, Any], key: str, where: Path) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise CheckpointError(
            where,
            f"{key}: expected a whole number above 0, got {short(value)}",
            fix="give the folder of a causal language model",
        )
    return value
