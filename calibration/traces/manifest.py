"""trace.json describes a trace folder: keys and their meaning, but no tensors."""

import json
from dataclasses import dataclass
from typing import Literal

from ...recipes.decode import encode
from .dataset_source import DatasetSource
from .too_long import TooLongPrompts

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
    config_sha256: str | None
    weights_sha256: str | None
    num_layers: int
    vocab_size: int


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
    width: int
    dtype: FeatureDtype
    aux_layer_ids: tuple[int, ...]
    aux_semantics: Literal["post_layer"] = "post_layer"
    fusion_sha256: str | None
    storage: FeatureStorage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens were drawn at a temperature above 0.

    Attributes:
        top_p: in (0, 1]; 1 means all tokens. top_k: 0 means all tokens.
        seed: None if the recorder does not report it.
    """

    top_p: float = 1.0
    top_k: int = 0
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
    num_top: int = 0


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
    prompt_length: int
    num_tokens: int
    file: str
    conversation_sha256: str | None = None
    cluster: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One safetensors file beside trace.json.

    Attributes:
        file: its name.
        nbytes: its size in bytes.
        sha256: hash of its bytes.
    """

    file: str
    nbytes: int
    sha256: str


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
    nbytes: int
    sha256: str
    num_token_ids: int
    width: int
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
        ignore_eos: whether continuations go on behind the target's end-of-text tokens.
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
    temperature: float
    sampling: Sampling | None = None
    ignore_eos: bool = False
    recorded_by: str | None = None
    target: TargetIdentity
    features: FeatureSpec
    logprobs: LogprobSpec | None = None
    too_long: TooLongPrompts | None = None
    datasets: tuple[DatasetSource, ...] | None = None
    num_tokens: int
    prompts: tuple[TraceEntry, ...]
    shards: tuple[Shard, ...]
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


def manifest_text(manifest: TraceManifest) -> str:
    """The bytes of trace.json: equal manifests give equal text."""
    return json.dumps(encode(manifest), indent=1, ensure_ascii=False) + "\n"
