"""The target's verify step: as measured, by the bytes that a token reads, or by its config.json.

Only dense targets: which experts of a mixture a batch reads depends on routing, not on the config.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..drafts.config_reader import ConfigReader
from ..errors import EstimateError
from ..files.checkpoint import CONFIG_FILE, read_json_object
from .attention_cache import grouped_work
from .work import ELEMENT_BYTES, Machine, Pass, Work

_DENSE = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose every layer is q, k, v, o and gate, up, down, and nothing else that weighs."""
_MIXTURE = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
_GIVE = (
    "give the target's measured verify step (--target-step-ms), or the bytes"
    " that it reads (--target-bytes)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """Seconds of a verify step, measured; by concurrency, or under None one for all of them."""

    seconds: Mapping[int | None, float]

    def verify_seconds(self, _machine: Machine, concurrency: int) -> float | None:
        """As measured at this concurrency; None where it was not."""
        return self.seconds.get(concurrency, self.seconds.get(None))

    def __str__(self) -> str:
        return "its verify step as measured (--target-step-ms)"


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedStep:
    """A verify step by roofline."""

    verify: Pass
    origin: str

    def verify_seconds(self, machine: Machine, concurrency: int) -> float:
        """On a machine, at a concurrency."""
        return machine.pass_seconds(self.verify, concurrency)

    def __str__(self) -> str:
        return self.origin


Target = MeasuredStep | EstimatedStep


def parse_step_times(text: str, concurrencies: Sequence[int]) -> MeasuredStep:
    """Milliseconds of a verify step: `14.2` for every concurrency, or `1=9.5,8=14.2`.

    Args:
        text: as the command line has it.
        concurrencies: that are asked for.

    Raises:
        EstimateError: neither of the two, no positive times, or one of a concurrency that is not
            asked for.
    """
    pairs = [part.rpartition("=") for part in text.split(",")]
    try:
        times = {int(c) if given else None: float(ms) / 1e3 for c, given, ms in pairs}
    except ValueError:
        times = {}
    alone = None in times and len(pairs) > 1
    wrong = any(not 0 < seconds < math.inf for seconds in times.values())
    if not times or alone or wrong or len(times) < len(pairs):
        raise EstimateError(
            "--target-step-ms",
            f"expected milliseconds, or CONCURRENCY=MILLISECONDS with commas between, got {text!r}",
            fix="for example 14.2, or 1=9.5,8=14.2,64=38",
        )
    stray = [c for c in times if c is not None and c not in concurrencies]
    if stray:
        asked = ",".join(map(str, concurrencies))
        raise EstimateError(
            "--target-step-ms",
            f"a time at concurrency {stray[0]}, but --concurrency is {asked}",
            fix="name the concurrencies that were measured: --concurrency "
            + ",".join(str(c) for c in times),
        )
    return MeasuredStep(seconds=times)


def step_of_bytes(nbytes: float, *, num_draft_tokens: int, tp: int) -> EstimatedStep:
    """A verify step that reads so many bytes of weights, as 2-byte weights compute.

    Args:
        nbytes: of weights, that one token reads.
        num_draft_tokens: K; K + 1 tokens of each sequence are verified.
        tp: tensor-parallel shards.

    Raises:
        EstimateError: not a positive number of bytes.
    """
    if not 0 < nbytes < math.inf:
        raise EstimateError(
            "--target-bytes",
            f"expected a positive number, got {nbytes:g}",
            fix="give the bytes of weights that one token reads, such as 140e9",
        )
    whole = int(nbytes)
    weights = Work(
        part="other",
        weight_bytes=whole,
        sequence_flops=whole * (num_draft_tokens + 1),
        byte_shards=tp,
        flop_shards=tp,
    )
    return EstimatedStep(
        verify=Pass(name="verify", works=(weights,)),
        origin=f"a verify step that reads {whole:,} bytes of weights, as 2-byte weights compute"
        " (--target-bytes); its KV cache is not counted, and a mixture of experts reads more the"
        " more tokens choose experts: its step is longer then, and less is gained",
    )


def step_of_config(
    target: Path, *, num_draft_tokens: int, context: int, tp: int, vocab_size: int
) -> EstimatedStep:
    """A verify step of a dense target in 16 bits, by its config.json alone.

    Args:
        target: folder with config.json.
        num_draft_tokens: K; K + 1 tokens of each sequence are verified.
        context: positions in each sequence's KV cache.
        tp: tensor-parallel shards.
        vocab_size: the draft's, which must be the target's.

    Raises:
        CheckpointError: there is no such config.json, or a key is missing or wrong.
        EstimateError: what such a target reads does not follow from its config, or it is not the
            draft's target.
    """
    where = target / CONFIG_FILE
    config = read_json_object(where, "give the folder of the target")
    keys = ConfigReader(config, where)
    if config.get("text_config") is not None:
        keys = keys.section("text_config")
    _check_dense(keys)
    hidden, inner = keys.positive("hidden_size"), keys.positive("intermediate_size")
    heads, layers = keys.positive("num_attention_heads"), keys.positive("num_hidden_layers")
    key_value_heads = keys.positive("num_key_value_heads", heads)
    head_dim, vocab = keys.positive("head_dim", hidden // heads), keys.positive("vocab_size")
    if vocab != vocab_size:
        raise EstimateError(
            where,
            f"vocab_size: expected {vocab_size}, as the draft's config says, got {vocab}",
            fix="give the target that the draft was trained for",
        )
    tokens = num_draft_tokens + 1
    wide, narrow = 2 * heads * head_dim, 2 * key_value_heads * head_dim  # q and o; k and v
    matrices = [(layers * wide * hidden, tp), (layers * narrow * hidden, min(tp, key_value_heads))]
    matrices += [(layers * 3 * inner * hidden, tp), (vocab * hidden, tp)]
    cache = grouped_work(
        positions=context,
        queries=tokens,
        heads=heads,
        key_value_heads=key_value_heads,
        head_dim=head_dim,
        tp=tp,
    )
    works = (*_matrices(matrices, tokens), *((cache,) * layers))
    return EstimatedStep(
        verify=Pass(name="verify", works=works),
        origin=f"a verify step of {sum(n for n, _ in matrices):,} weights in 16 bits and a BF16 KV"
        f" cache, by {where}",
    )


def _matrices(sizes: Sequence[tuple[int, int]], tokens: int) -> list[Work]:
    return [
        Work(
            part="other",
            weight_bytes=ELEMENT_BYTES * numel,
            sequence_flops=2 * numel * tokens,
            byte_shards=shards,
            flop_shards=shards,
        )
        for numel, shards in sizes
    ]


def _check_dense(keys: ConfigReader) -> None:
    kind = keys.config.get("model_type")
    if any(keys.config.get(key) is not None for key in _MIXTURE):
        reason = (
            "the target is a mixture of experts, and how many experts a batch reads"
            " depends on routing"
        )
    elif keys.config.get("quantization_config") is not None:
        reason = (
            "the target is stored quantized, so its config does not tell the size of its weights"
        )
    elif kind not in _DENSE:
        known = ", ".join(_DENSE)
        reason = f"model_type: expected one of {known}, whose layers are plain, got {kind!r}"
    else:
        return
    raise EstimateError(keys.where, reason, fix=_GIVE)
