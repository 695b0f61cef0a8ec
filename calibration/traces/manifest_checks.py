"""trace.json is read strictly: what its types do not say is checked here."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from ...recipes.errors import short
from ...recipes.strict_json import JsonProblem, decode, parse_object
from ..errors import TraceError
from .dataset_source import datasets_problem
from .manifest import FeatureSpec, Shard, TargetIdentity, TraceManifest
from .names import LONGEST_NAME, is_printable_name

_SHARD_FILE = re.compile(r"traces-\d{5}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def parse_manifest(text: str, where: Path) -> TraceManifest:
    """Decode and check the text of a trace.json.

    Raises:
        TraceError: a key is unknown, missing, doubled, mistyped, or contradicts another.
    """
    try:
        manifest: TraceManifest = decode(TraceManifest, parse_object(text))
    except JsonProblem as exc:
        raise TraceError(where, str(exc), fix="record the traces again with this version") from exc
    check_manifest(manifest, where)
    return manifest


def check_manifest(manifest: TraceManifest, where: Path) -> None:
    """Check what the types alone do not say.

    Raises:
        TraceError: the first contradiction.
    """
    problem = (
        _target_problem(manifest.target)
        or _feature_problem(manifest.features, manifest.target.num_layers)
        or _decoding_problem(manifest)
        or _shard_problem(manifest.shards)
        or _prompt_problem(manifest)
        or _tables_problem(manifest)
        or datasets_problem(manifest.datasets)
    )
    if problem:
        raise TraceError(where, problem, fix="record the traces again")


def _target_problem(target: TargetIdentity) -> str | None:
    for name in ("config_sha256", "weights_sha256"):
        digest = getattr(target, name)
        if digest is not None and not _SHA256.fullmatch(digest):
            return f"target.{name}: expected 64 hex digits, got {short(digest)}"
    if target.num_layers < 1 or target.vocab_size < 1:
        return "target: num_layers and vocab_size: expected at least 1"
    return None


def _feature_problem(features: FeatureSpec, num_layers: int) -> str | None:
    ids = features.aux_layer_ids
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= num_layers:
        return (
            f"features.aux_layer_ids: expected ascending ids within the {num_layers} layers of the"
            f" target, got {short(list(ids))}"
        )
    if features.width < 1 or (features.kind == "aux" and features.width % len(ids)):
        return f"features.width: {features.width} cannot be {len(ids)} layers side by side"
    if features.storage == "fp8-per-token" and features.dtype not in ("bfloat16", "float32"):
        # Float16 has too small a range: rounded twice, codes of small rows would change.
        return f"features.storage: fp8-per-token keeps bfloat16 or float32, not {features.dtype}"
    digest = features.fusion_sha256
    if (features.kind == "fused") != (digest is not None):
        return f"features.fusion_sha256: {digest!r} contradicts kind {features.kind!r}"
    if digest is not None and not _SHA256.fullmatch(digest):
        return f"features.fusion_sha256: expected 64 hex digits, got {digest!r}"
    return None


def _decoding_problem(manifest: TraceManifest) -> str | None:
    temperature, sampling, logprobs = manifest.temperature, manifest.sampling, manifest.logprobs
    if temperature < 0 or (temperature > 0) != (sampling is not None):
        return f"temperature: {temperature} contradicts sampling: {short(sampling)}"
    if sampling is not None and logprobs is None:
        return "logprobs: expected those of the sampled tokens"
    if sampling is not None and (not 0 < sampling.top_p <= 1 or sampling.top_k < 0):
        return f"sampling: expected top_p in (0, 1] and top_k of at least 0, got {sampling}"
    if logprobs is not None and not 0 <= logprobs.num_top <= manifest.target.vocab_size:
        return f"logprobs.num_top: expected 0 to {manifest.target.vocab_size}"
    if manifest.recorded_by is not None and not is_printable_name(manifest.recorded_by):
        return f"recorded_by: expected 1 to {LONGEST_NAME} printable characters"
    return None


def _shard_problem(shards: tuple[Shard, ...]) -> str | None:
    for i, shard in enumerate(shards):
        if not _SHARD_FILE.fullmatch(shard.file):
            return f"shards[{i}].file: expected traces-00001.safetensors, got {short(shard.file)}"
        if shard.nbytes < 0 or not _SHA256.fullmatch(shard.sha256):
            return f"shards[{i}]: nbytes or sha256 is malformed"
    doubled = _first_double(shard.file for shard in shards)
    return f"shards: {doubled!r} is listed twice" if doubled else None


def _prompt_problem(manifest: TraceManifest) -> str | None:
    if not manifest.prompts:
        return "prompts: expected at least one"
    files = {shard.file for shard in manifest.shards}
    for i, entry in enumerate(manifest.prompts):
        names = (("id", entry.id), ("category", entry.category), ("cluster", entry.cluster or "-"))
        for key, name in names:
            if not is_printable_name(name):
                return f"prompts[{i}].{key}: expected 1 to {LONGEST_NAME} printable characters"
        if not 1 <= entry.prompt_length < entry.num_tokens:
            return (
                f"prompts[{i}] ({entry.id}): expected 1 <= prompt_length < num_tokens, got"
                f" {entry.prompt_length} and {entry.num_tokens}"
            )
        digest = entry.conversation_sha256
        if digest is not None and not _SHA256.fullmatch(digest):
            return f"prompts[{i}] ({entry.id}).conversation_sha256: expected 64 hex digits"
        if entry.file not in files:
            return f"prompts[{i}] ({entry.id}): {entry.file!r} is not listed in shards"
    doubled = _first_double(entry.id for entry in manifest.prompts)
    if doubled:
        return f"prompts: id {doubled!r} is given twice"
    total = sum(entry.num_tokens for entry in manifest.prompts)
    if total != manifest.num_tokens:
        return f"num_tokens: {manifest.num_tokens}, but the prompts add up to {total}"
    return None


def _tables_problem(manifest: TraceManifest) -> str | None:
    tables, features = manifest.tables, manifest.features
    if tables is None:
        return None
    if tables.nbytes < 0 or not _SHA256.fullmatch(tables.sha256):
        return "tables: nbytes or sha256 is malformed"
    if not 1 <= tables.num_token_ids <= manifest.target.vocab_size:
        return (
            f"tables.num_token_ids: expected 1 to {manifest.target.vocab_size}, the target's"
            f" vocabulary, got {tables.num_token_ids}"
        )
    aux_width = tables.width * len(features.aux_layer_ids)
    if tables.width < 1 or (features.kind == "aux" and features.width != aux_width):
        return f"tables.width: {tables.width} contradicts features of width {features.width}"
    return None


def _first_double(names: Iterable[str]) -> str | None:
    counts = Counter(names)
    return next((name for name, count in counts.items() if count > 1), None)
