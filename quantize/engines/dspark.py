"""What vLLM 0.33.0 and SGLang 0.5.23 make of a DSpark draft's config.json and Markov head.

Sources: loading executed (`tests/engines/RESULTS.md`), whose error texts these are;
`qwen3_dspark.py` and `config/speculative.py:1535` of vLLM, `models/dspark.py` and
`dspark_config.py` of SGLang.
"""

from collections.abc import Iterable, Mapping

from ..drafts.architectures import declared_architecture
from .contract import Finding, Module, Question

ARCHITECTURES = frozenset({"Qwen3DSparkModel", "DSparkDraftModel"})
"""Names under which both load it."""
FLAT = ("confidence_proj.", "gate_proj.", "joint_proj.", "markov_w1.", "markov_w2.")
"""How ModelOpt's exports begin the names of the heads, in the order in which vLLM meets them."""
MARKOV = Module(
    "model.markov_head.markov_w2",
    "model.markov_head.markov_w2",
    ("markov_head.markov_w2",),
    "replicated",
)
"""A ParallelLMHead in vLLM, `qwen3_dspark.py:70`, which lm_head's kin quantize; plain in SGLang."""

_NO_NAME = "ValueError: There is no module or parameter named '{}' in {}."
_RENAME = "name the heads as SpecForge does: markov_head.markov_w1, confidence_head.proj"
_TOP = "write markov_rank, markov_head_type and the keys of the confidence head at the top level"
_GATES = {"gated": "gate_up_proj", "rnn": "joint_proj"}
"""Kind of a Markov head -> its linear, as vLLM's loader spells it."""


def vllm_problem(question: Question) -> Finding | None:
    """Rules of `SpeculativeConfig`, `Qwen3DSparkModel` and its loader."""
    config = question.config
    name, flat = declared_architecture(config), _flat(question.tensor_names)
    if flat:
        where = "DFlashQwen3Model" if name == "DFlashDraftModel" else "Qwen3DSparkModel"
        return Finding("load", _NO_NAME.format(flat.rstrip("."), where), _RENAME)
    if name == "DFlashDraftModel":
        remedy = "set architectures to Qwen3DSparkModel"
        return Finding("load", _NO_NAME.format("confidence_head", "DFlashQwen3Model"), remedy)
    if name == "DSparkDraftModel" and config.get("model_type") != "qwen3":
        text = f"model_type {config.get('model_type')}: vLLM takes the draft for DeepSeek-V4's own"
        return Finding("unknown", text, "set architectures to Qwen3DSparkModel")
    if config.get("markov_rank") is None:
        text = "AttributeError: 'Qwen3Config' object has no attribute 'markov_rank'"
        return Finding("init", text, _TOP)
    if (kind := config.get("markov_head_type")) in tuple(_GATES):  # of any JSON type
        gate = f"markov_head.{_GATES[kind]}"
        return Finding("load", _NO_NAME.format(gate, "Qwen3DSparkModel"), "serve it with SGLang")
    return _other_confidence(question)


def _other_confidence(question: Question) -> Finding | None:
    """Without a key the confidence head reads no Markov embedding, which trainers let it do."""
    config = question.config
    stored = "confidence_head.proj.weight" in question.tensor_names
    if not (stored and config.get("enable_confidence_head")):
        return None
    if config.get("confidence_head_with_markov") is not None:
        return None
    width = config["hidden_size"]
    text = (
        "AssertionError: Tried to load weights of size torch.Size([1,"
        f" {width + config['markov_rank']}])to a parameter of size torch.Size([1, {width}])"
    )
    return Finding("load", text, "write confidence_head_with_markov: true")


def sglang_problem(question: Question) -> Finding | None:
    """Rules of `parse_dspark_draft_config`, `build_markov_head` and the loader."""
    config = question.config
    flat = _flat(question.tensor_names)
    if declared_architecture(config) == "DFlashDraftModel" or flat:
        what = f"dropped: {flat or 'markov_head.'}*, without which the draft is another one"
        remedy = _RENAME if flat else "set architectures to Qwen3DSparkModel"
        return Finding("wrong", what, remedy)
    nested = config.get("dflash_config")
    keys = {**config, **(nested if isinstance(nested, Mapping) else {})}
    if keys.get("markov_head_type") is None:
        text = "ValueError: DSpark requires markov_head_type when markov_rank > 0, got None."
        return Finding("init", text, "write markov_head_type: vanilla")
    if config.get("markov_rank") is None:
        text = (
            "ValueError: DSpark requires markov_rank > 0 (the Markov head is the core of the"
            " semi-AR draft); got markov_rank=0."
        )
        return Finding("init", text, _TOP)
    own, vocab = config.get("draft_vocab_size"), config.get("vocab_size")
    if own not in (None, vocab):
        rank = config["markov_rank"]
        text = (
            f"AssertionError: Attempted to load weight (torch.Size([{own}, {rank}])) into parameter"
            f" (torch.Size([{vocab}, {rank}]))"
        )
        return Finding("load", text, "serve it with vLLM, or train it with the whole vocabulary")
    return None


def _flat(names: Iterable[str]) -> str:
    """The first beginning of ModelOpt's that one of the names has; "" = none."""
    own = tuple(names)
    return next((flat for flat in FLAT if any(name.startswith(flat) for name in own)), "")
