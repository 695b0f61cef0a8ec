"""trace.json describes a trace folder: keys and their meaning, but no tensors."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeGuard

from ...recipes.decode import (
    AT_LEAST_0,
    AT_LEAST_1,
    HEX_64,
    SHARE_OR_ALL,
    Spelled,
    encode,
    problem_of,
)
from ...recipes.errors import TraceError, short
from ...recipes.strict_json import decode, parse_object, reading

LONGEST_NAME = 200


def is_printable_name(value: object) -> TypeGuard[str]:
    """True for text of 1 to 200 printable characters."""
    return isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and value.isprintable()


TooLong = Literal["error", "skip", "truncate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLongPrompts:
    """Prompts that the target had too few positions for, by id."""

    skipped: tuple[str, ...] = ()
    truncated: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSource:
    """Rows of a data set of the Hugging Face Hub.

    Attributes:
        name: owner/name. revision: hash of the commit. config, split: as the Hub calls them.
        column: that held the prompts, where one was named; None = the one that is known.
        seed: of the choice of rows; None = all rows.
    """

    name: str
    revision: Annotated[str, Spelled("[0-9a-f]{40}", "40 hex digits")]
    config: str
    split: str
    column: str | None = None
    seed: int | None = None

    def __str__(self) -> str:
        column = f", column {self.column}" if self.column else ""
        rows = "all rows" if self.seed is None else f"rows drawn with seed {self.seed}"
        return f"{self.name}@{self.revision[:12]}, {self.config}/{self.split}{column}, {rows}"


def datasets_problem(datasets: Sequence[DatasetSource] | None) -> str | None:
    """What is wrong with the key of trace.json; None where nothing is."""
    if datasets is None:
        return None
    if not datasets:
        return "datasets: expected one at least, or no key"
    for data in datasets:
        names = (data.name, data.config, data.split, *([data.column] if data.column else []))
        if not all(map(is_printable_name, names)):
            return f"datasets: expected names of 1 to {LONGEST_NAME} printable characters"
    return None


MANIFEST_FILE = "trace.json"
TABLES_FILE: Literal["tables.safetensors"] = "tables.safetensors"
FeatureKind = Literal["aux", "fused"]
FeatureDtype = Literal["float32", "float64", "bfloat16", "float16"]
FeatureStorage = Literal["fp8-per-token", "zstd"]
StorageChoice = Literal["exact", "fp8-per-token", "zstd"]
"""What options offer: exact = features as they are, which trace.json does not mention."""
TableDtype = Literal["BF16", "F16", "F32"]
LogprobKind = Literal["processed", "raw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetIdentity:
    """The target that was recorded.

    Attributes:
        name: folder name or Hub id, for reports.
        config_sha256: hash of the bytes of its config.json; None if the target was not at hand, as
            in an imported dump.
        weights_sha256: hash of the names and bytes of its safetensors files; None in the same case.
        num_layers: number of decoder layers. vocab_size: token ids lie in [0, vocab_size).
    """

    name: str
    config_sha256: Annotated[str | None, HEX_64]
    weights_sha256: Annotated[str | None, HEX_64]
    num_layers: Annotated[int, AT_LEAST_1]
    vocab_size: Annotated[int, AT_LEAST_1]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSpec:
    """What every `features` tensor holds.

    Attributes:
        kind: "aux" means the outputs of the aux layers side by side, in ascending layer order;
            "fused" means the output of the draft's fc on them, which is narrower but fits one fc
            only.
        width: number of elements per position.
        dtype: the dtype in which the target computed, and in which the features are read.
        aux_layer_ids: 0-based target layers, ascending.
        aux_semantics: "post_layer" means the output of the layer (id i is hidden_states[i + 1] of
            transformers), never the output of the final norm.
        fusion_sha256: hash of the draft's fusion weights for "fused", None for "aux".
        storage: "fp8-per-token" means rounded to FP8 E4M3 with a float32 scale for each position;
            "zstd" means packed without loss; left out where they are stored as they are.
    """

    kind: FeatureKind
    width: Annotated[int, AT_LEAST_1]
    dtype: FeatureDtype
    aux_layer_ids: tuple[int, ...]
    aux_semantics: Literal["post_layer"] = "post_layer"
    fusion_sha256: Annotated[str | None, HEX_64]
    storage: FeatureStorage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens were drawn at a temperature above 0.

    Attributes:
        top_p: in (0, 1]; 1 means all tokens. top_k: 0 means all tokens.
        seed: None if the recorder does not report it.
    """

    top_p: Annotated[float, SHARE_OR_ALL] = 1.0
    top_k: Annotated[int, AT_LEAST_0] = 0
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobSpec:
    """Natural logarithms of the target's probabilities, recorded with the continuations.

    Attributes:
        kind: "processed" means the distribution that was sampled from, after temperature, top-k and
            top-p; "raw" means that of the untouched logits.
        num_top: number of most likely tokens that are recorded beside each emitted token.
    """

    kind: LogprobKind
    num_top: Annotated[int, AT_LEAST_0] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEntry:
    """One prompt.

    Attributes:
        id: name of the prompt; the names of its tensors begin with it.
        category: category from the prompt file.
        prompt_length: P, number of tokens of the prompt.
        num_tokens: N, number of tokens of prompt and continuation.
        file: the shard that holds its tensors.
        conversation_sha256: hash of the conversation's first turn, for a later turn; left out for
            a first turn.
        cluster: name of the group that the prompt file declares; left out if it declares none.
    """

    id: str
    category: str
    prompt_length: Annotated[int, AT_LEAST_1]
    num_tokens: int
    file: str
    conversation_sha256: Annotated[str | None, HEX_64] = None
    cluster: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One safetensors file beside trace.json.

    Attributes:
        file: its name.
        nbytes: its size in bytes.
        sha256: hash of its bytes.
    """

    file: Annotated[str, Spelled(r"traces-\d{5}\.safetensors", "traces-00001.safetensors")]
    nbytes: Annotated[int, AT_LEAST_0]
    sha256: Annotated[str, HEX_64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TablesFile:
    """The file with the target's embedding and head beside trace.json.

    Attributes:
        file: its name. nbytes: its size in bytes. sha256: hash of its bytes.
        num_token_ids: n, number of tokens whose embedding is stored.
        width: W, width of the target's hidden states.
        embed_tokens_dtype, lm_head_dtype: dtype in which the target stores them.
        norm_dtype: dtype of the norm before the head; None if the target's norm is not known.
    """

    file: Literal["tables.safetensors"] = TABLES_FILE
    nbytes: Annotated[int, AT_LEAST_0]
    sha256: Annotated[str, HEX_64]
    num_token_ids: Annotated[int, AT_LEAST_1]
    width: Annotated[int, AT_LEAST_1]
    embed_tokens_dtype: TableDtype
    lm_head_dtype: TableDtype
    norm_dtype: TableDtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceManifest:
    """The whole of trace.json. A key whose value is None is left out.

    Attributes:
        format: kind of the file. version: version of the format.
        temperature: temperature of the continuations; 0 means greedy.
        sampling: how tokens were drawn; None for greedy continuations.
        ignore_eos: whether continuations go on after the target's end-of-text tokens.
        recorded_by: engine and version; None for transformers.
        target: the target that was recorded. features: what is stored for each position.
        logprobs: None if none are recorded; sampled traces have them.
        too_long: prompts that were left out or cut; None if there were none.
        datasets: data sets of the Hub that prompts were taken out of; None if there are none.
        num_tokens: sum over the prompts.
        prompts: prompts in the order of recording. shards: files that hold their tensors.
        tables: the file with the target's embedding and head; None if the folder has none.
    """

    format: Literal["draftquant-trace"] = "draftquant-trace"
    version: Literal[1] = 1
    temperature: Annotated[float, AT_LEAST_0]
    sampling: Sampling | None = None
    ignore_eos: bool = False
    recorded_by: str | None = None
    target: TargetIdentity
    features: FeatureSpec
    logprobs: LogprobSpec | None = None
    too_long: TooLongPrompts | None = None
    datasets: tuple[DatasetSource, ...] | None = None
    num_tokens: int = 0
    prompts: tuple[TraceEntry, ...] = ()
    shards: tuple[Shard, ...] = ()
    tables: TablesFile | None = None

    @property
    def sampled(self) -> bool:
        """Whether the continuations were drawn, not chosen greedily."""
        return self.sampling is not None

    @property
    def logprobs_as_sampled(self) -> bool:
        """Whether the log-probabilities are those of the distribution that was sampled from."""
        if self.logprobs is None or self.sampling is None:
            return False
        plain = (self.temperature, self.sampling.top_p, self.sampling.top_k) == (1, 1, 0)
        return self.logprobs.kind == "processed" or plain

    def problem(self) -> str | None:
        """What fields say together and must not."""
        doubled = _first_double(shard.file for shard in self.shards)
        return (
            _feature_problem(self.features, self.target.num_layers)
            or _decoding_problem(self)
            or (f"shards: {doubled!r} is listed twice" if doubled else None)
            or _prompt_problem(self)
            or _tables_problem(self)
            or datasets_problem(self.datasets)
        )


def manifest_text(manifest: TraceManifest) -> str:
    """The bytes of trace.json: equal manifests give equal text."""
    return json.dumps(encode(manifest), indent=1, ensure_ascii=False) + "\n"


def parse_manifest(text: str, where: Path) -> TraceManifest:
    """Decode and check the text of a trace.json."""
    with reading(where, TraceError, "record the traces again with this version"):
        manifest: TraceManifest = decode(TraceManifest, parse_object(text))
    return manifest


def check_manifest(manifest: TraceManifest, where: Path) -> None:
    """Check a manifest that was not read."""
    if problem := problem_of(manifest) or manifest.problem():
        raise TraceError(where, problem, fix="record the traces again")


def _feature_problem(features: FeatureSpec, num_layers: int) -> str | None:
    ids, digest = features.aux_layer_ids, features.fusion_sha256
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= num_layers:
        return (
            f"features.aux_layer_ids: expected ascending ids within the {num_layers} layers of the"
            f" target, got {short(list(ids))}"
        )
    if features.kind == "aux" and features.width % len(ids):
        return f"features.width: {features.width} cannot be {len(ids)} layers side by side"
    if features.storage == "fp8-per-token" and features.dtype not in ("bfloat16", "float32"):
        # Float16 has too small a range: rounded twice, codes of small rows would change.
        return f"features.storage: fp8-per-token keeps bfloat16 or float32, not {features.dtype}"
    if (features.kind == "fused") != (digest is not None):
        return f"features.fusion_sha256: {digest!r} contradicts kind {features.kind!r}"
    return None


def _decoding_problem(manifest: TraceManifest) -> str | None:
    temperature, sampling, logprobs = manifest.temperature, manifest.sampling, manifest.logprobs
    if (temperature > 0) != (sampling is not None):
        return f"temperature: {temperature} contradicts sampling: {short(sampling)}"
    if sampling is not None and logprobs is None:
        return "logprobs: expected those of the sampled tokens"
    if logprobs is not None and logprobs.num_top > manifest.target.vocab_size:
        return f"logprobs.num_top: expected 0 to {manifest.target.vocab_size}"
    if manifest.recorded_by is not None and not is_printable_name(manifest.recorded_by):
        return f"recorded_by: expected 1 to {LONGEST_NAME} printable characters"
    return None


def _prompt_problem(manifest: TraceManifest) -> str | None:
    if not manifest.prompts:
        return "prompts: expected at least one"
    files = {shard.file for shard in manifest.shards}
    for i, entry in enumerate(manifest.prompts):
        names = (("id", entry.id), ("category", entry.category), ("cluster", entry.cluster or "-"))
        for key, name in names:
            if not is_printable_name(name):
                return f"prompts[{i}].{key}: expected 1 to {LONGEST_NAME} printable characters"
        if not entry.prompt_length < entry.num_tokens:
            return (
                f"prompts[{i}] ({entry.id}): expected 1 <= prompt_length < num_tokens, got"
                f" {entry.prompt_length} and {entry.num_tokens}"
            )
        if entry.file not in files:
            return f"prompts[{i}] ({entry.id}): {entry.file!r} is not listed in shards"
    if doubled := _first_double(entry.id for entry in manifest.prompts):
        return f"prompts: id {doubled!r} is given twice"
    total = sum(entry.num_tokens for entry in manifest.prompts)
    if total != manifest.num_tokens:
        return f"num_tokens: {manifest.num_tokens}, but the prompts add up to {total}"
    return None


def _tables_problem(manifest: TraceManifest) -> str | None:
    tables, features = manifest.tables, manifest.features
    if tables is None:
        return None
    if tables.num_token_ids > manifest.target.vocab_size:
        return (
            f"tables.num_token_ids: expected 1 to {manifest.target.vocab_size}, the target's"
            f" vocabulary, got {tables.num_token_ids}"
        )
    if features.kind == "aux" and features.width != tables.width * len(features.aux_layer_ids):
        return f"tables.width: {tables.width} contradicts features of width {features.width}"
    return None


def _first_double(names: Iterable[str]) -> str | None:
    counts = Counter(names)
    return next((name for name, count in counts.items() if count > 1), None)
