"""A target as a draft sees it: what its config.json, its headers and its side files say.

For a target without weights (a Hub id, from which only JSON files are fetched) the
names come from its index.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...recipes.brief import counted
from ...recipes.errors import CheckpointError, short
from ..drafts.config_reader import object_at, with_text_config
from ..drafts.recognition import kind_of_draft
from ..drafts.rope import declared
from ..engines.contract import EngineName
from ..files.checkpoint import CONFIG_FILE, INDEX_FILE, Checkpoint, read_json_object
from ..files.hub import Reference, no_target
from ..stored.stored_declaration import COMPANIONS, quantized_looking

# ---- How a model rotates positions, and for how many it is made, as engines derive it

_MOST = 2**40  # of a factor, a base and positions: no model has more, and products stay finite

_ALREADY_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds whose max_position_embeddings holds the factor: vLLM `config/model.py:2613`."""
_SIZES_CACHE_ONLY = ("default", "linear", "llama3", "ntk", "proportional")
"""Kinds in which max_position_embeddings is the length of a table: vLLM
`config/speculative.py:104`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The rope of one config.

    Attributes:
        kind: rope_type; "default" = plain.
        factor: of the scaling; 1 = none.
        positions: number in the config; None = the config does not say.
        originally: positions before a scaling that names them; None = not named.
    """

    kind: str
    factor: float
    positions: int | None
    originally: int | None

    @classmethod
    def of(cls, config: Mapping[str, Any], where: Path | str = CONFIG_FILE) -> "Rotation":
        """Of a config.json; a number that cannot rotate positions is an error at `where`."""
        keys = declared(config).keys
        kind, originally = keys["rope_type"], keys.get("original_max_position_embeddings")
        factor, positions = keys.get("factor"), config.get("max_position_embeddings")
        if not isinstance(factor, int | float) or factor <= 0:
            factor = 1  # there is none, or one that engines ignore
        if type(positions) is not int or positions < 1:
            positions = None
        bounded = {"rope scaling factor": factor, "max_position_embeddings": positions or 1}
        for what, number in bounded.items():
            if not number <= _MOST:  # NaN too
                raise _unfit(where, what, "a number up to 2^40", number)
        return cls(
            kind=kind if isinstance(kind, str) else "default",
            factor=float(factor),
            positions=positions,
            originally=originally if type(originally) is int else None,
        )

    def positions_in(self, engine: EngineName) -> int | None:
        """Positions that an engine derives from those in the config.

        vLLM: `_get_and_verify_max_len`, `config/model.py:2546`; SGLang: `get_context_length`,
        `hf_transformers/common.py:677`.
        """
        if self.positions is None:
            return None
        scaled = engine == "vllm" and self.kind not in _ALREADY_SCALED
        if engine == "sglang":
            scaled = self.originally is None and self.kind != "llama3"
        return int(self.positions * (self.factor if scaled else 1.0))

    @property
    def only_sizes_a_table(self) -> bool:
        """Whether more positions leave every angle unchanged."""
        return self.kind in _SIZES_CACHE_ONLY


_AS_IT_CAME = "give the config.json that the model came with"


def _unfit(
    where: object, what: str, expected: str, value: object, fix: str = _AS_IT_CAME
) -> CheckpointError:
    return CheckpointError(where, f"{what}: expected {expected}, got {short(value)}", fix=fix)


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
_CACHE = "kv_cache_quant_algo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One target.

    Attributes:
        named: its name in a launch line.
        text: the keys of its language model.
        vocab_size: rows of its embedding. hidden_size: width of one layer's output.
        checkpoint: headers of all shards; None where the weights are missing.
        names: names of its tensors; empty where both shards and index are missing.
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
        text = {**config, **next((each for each in sections if isinstance(each, Mapping)), {})}
        _check_keys(text, where)
        checkpoint, names = stored_tensors(folder)
        return cls(
            folder=folder,
            named=named or str(folder),
            config=config,
            text=text,
            num_layers=text["num_hidden_layers"],
            vocab_size=text["vocab_size"],
            hidden_size=text["hidden_size"],
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
        written = self.text.get(first, self.text.get(second))
        return written if isinstance(written, Mapping) else None

    @property
    def quantization(self) -> str | None:
        """The quant_method that it declares, as written; None = it declares none."""
        keys = self.declaration
        if keys is None:
            return None
        return str(keys.get("quant_method") or keys.get("quant_algo") or "without a quant_method")

    @property
    def cache_dtype(self) -> str | None:
        """Dtype of its KV cache, as vLLM reads a declaration: `get_kv_cache_quant_algo_string`."""
        keys = self.declaration or {}
        nested, scheme = object_at(keys, "quantization"), object_at(keys, "kv_cache_scheme")
        algorithm = keys.get(_CACHE) if keys.get(_CACHE) is not None else nested.get(_CACHE)
        if isinstance(algorithm, str):
            return algorithm.lower()
        eight = scheme.get("num_bits") == 8
        return ("fp8" if scheme.get("type") == "float" else "int8") if eight else None

    def is_stored_quantized(self, table: str) -> bool | None:
        """Whether its lm_head or embed_tokens is stored quantized; None = not known.

        Tables inside a layer, which DeepSeek's MTP layer repeats, do not count.
        """
        if not self.names:
            return None
        own = [name for name in self.names if f".{table}." in f".{name}" and ".layers." not in name]
        if any(name.rpartition(".")[2] in COMPANIONS for name in own):
            return True
        if self.checkpoint is None:
            return None if self.declaration is not None else False
        return bool(quantized_looking(self.checkpoint.tensors[name] for name in own))


def declared_dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype that a config.json names, in the key of transformers 5 or 4; None = none."""
    dtype = config.get("dtype") or config.get("torch_dtype")
    return dtype.removeprefix("torch.") if isinstance(dtype, str) else None


def stored_tensors(folder: Path) -> tuple[Checkpoint | None, frozenset[str]]:
    """Headers and names; only names where the index exists and no shard does."""
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


def _check_keys(config: Mapping[str, Any], where: Path) -> None:
    """Sizes are given; what engines divide is a number, one per layer, or not given."""
    for key in _SIZES:
        if type(value := config.get(key)) is not int or value < 1:
            fix = "give the folder of a causal language model"
            raise _unfit(where, key, "a whole number above 0", value, fix)
    for key, least in _DIVIDED.items():
        is_fit = type(value := config.get(key)) is int and value >= least
        if not is_fit and not isinstance(value, list | None):
            raise _unfit(where, key, f"a whole number of at least {least}", value)
    for key in _DECLARATIONS:
        if not isinstance(value := config.get(key), Mapping | None):
            raise _unfit(where, key, "an object", value)


# ---- Which of two folders drafts for the other

_GROWS = ("num_hidden_layers", "hidden_size")
_Operand = tuple[str | None, Mapping[str, Any]]
"""What draft a folder holds, None = no draft or an unknown one; and the keys of its config.json."""


def check_operands(target: Reference, draft: Reference | None) -> None:
    """Refuse a draft in the place of its target, and a language model that outgrows its target.

    What cannot be read here, as an id on the Hub, is left to whoever reads it.
    """
    theirs, ours = _operand(target), _operand(draft) if draft is not None else None
    if theirs is None:
        return
    is_model = ours is not None and ours[0] is None
    sizes = [(ours[1].get(key), theirs[1].get(key)) for key in _GROWS] if ours else []
    if theirs[0] is not None:
        what = f"it is given as the target, and is a draft itself: {theirs[0]}"
    elif is_model and all(type(a) is int and type(b) is int and a > b for a, b in sizes):
        what = f"it is given as the target, and has fewer and narrower layers than {draft}"
    else:
        return
    fix = "give the folder of the model that the draft proposes for"
    if is_model:
        what += "; the draft and its target are swapped"
        fix = f"give {target} as the draft, and {draft} as the target"
    raise CheckpointError(target, what, fix=fix)


def _operand(reference: Reference) -> _Operand | None:
    folder = Path(reference)
    with suppress(CheckpointError):
        config = read_json_object(folder / CONFIG_FILE, no_target(folder))
        return kind_of_draft(config, stored_tensors(folder)[1]), with_text_config(config)
    return None


# ---- A tokenizer by what distinguishes it: its tokens and merges, not its file

_FILE = "tokenizer.json"
_MOST_BYTES = 64 << 20  # of a tokenizer.json, which may be larger than any config


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """One tokenizer.json: id -> token, added tokens included, and what else distinguishes it.

    Attributes:
        merges: digest of the merges; for other models than BPE, of their other settings.
    """

    tokens: Mapping[int, str]
    merges: str

    @classmethod
    def read(cls, folder: Path) -> "Tokenizer | None":
        """The tokenizer of a folder; None where it has no tokenizer.json."""
        if not (folder / _FILE).exists():
            return None
        again = "download the tokenizer again, or remove it"
        value = read_json_object(folder / _FILE, again, again=again, limit=_MOST_BYTES)
        model, added = object_at(value, "model"), value.get("added_tokens")
        rows = [
            row for row in (added if isinstance(added, list) else []) if isinstance(row, Mapping)
        ]
        own = {row["id"]: str(row.get("content")) for row in rows if type(row.get("id")) is int}
        rest = {key: part for key, part in model.items() if key != "vocab"}
        text = json.dumps(rest, sort_keys=True, ensure_ascii=False)
        return cls(
            tokens={**_listed(model.get("vocab")), **own},
            merges=hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
        )

    @property
    def size(self) -> int:
        """All token ids are below it."""
        return max(self.tokens, default=-1) + 1

    def difference(self, other: "Tokenizer") -> str | None:
        """Where this tokenizer differs from another; None = in nothing that changes token ids."""
        if self.tokens != other.tokens:
            unlike = {i for i, _ in self.tokens.items() ^ other.tokens.items()}
            here, there = (each.tokens.get(min(unlike), "no token") for each in (self, other))
            return (
                f"other tokens stand at {counted(len(unlike), 'id')}; the first is"
                f" {min(unlike):,}, {here!r} here and {there!r} in the target"
            )
        return None if self.merges == other.merges else "equal tokens, but other merges"


def _listed(vocab: object) -> dict[int, str]:
    """BPE and WordPiece map tokens to ids, Unigram lists tokens with their scores."""
    if isinstance(vocab, Mapping):
        return {i: token for token, i in vocab.items() if type(i) is int}
    rows = vocab if isinstance(vocab, list) else []
    return {i: str(row[0]) for i, row in enumerate(rows) if isinstance(row, list) and row}
