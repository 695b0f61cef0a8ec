"""What each key of config.json means to the family that reads it, and to engines.

Every key of a draft is left out, and then changed, one at a time. What is read differently then,
why it is refused, and what `check` says is kept: a default or a bound changed by mistake shows.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from asked_pairs import check_config
from by_recipe import draft_of, read_as
from draftquant.quantize.drafts.recognition import FAMILIES
from draftquant.recipes.errors import DraftQuantError
from test_family_refusals import BUILDERS as REFUSING
from test_gemma4_assistant import assistant
from tiny import tiny_eagle3_llama
from tiny_dflash import tiny_laguna
from tiny_dspark import tiny_nemotron
from tiny_mla import tiny_eagle3_mla
from told import check_told, lines_of, normal

pytestmark = pytest.mark.untold

Config = Mapping[str, Any]
ROPES: Mapping[str, Config] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 512},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.5,
               "high_freq_factor": 4.5, "original_max_position_embeddings": 512},
    "yarn": {"type": "yarn", "factor": 8.0, "beta_fast": 30.0, "beta_slow": 1.5, "mscale": 1.5,
             "mscale_all_dim": 0.5, "original_max_position_embeddings": 512},
}  # fmt: skip
SERVED = (
    *("llama", "mla", "dflash2", "dspark", "dspark-mla", "nemotron", "deepseek", "mimo"),
    *("qwen3.5", "step", "llama-yarn", "speculators-eagle3-qwen3", "speculators-dflash"),
)
REPEATED = {"two", "mla-two", "mla-pruned"}
PLAIN: Config = {"rope_theta": 20_000.0}
BUILDERS: Mapping[str, Callable[[Path], Path]] = {
    **{name: build for name, build in REFUSING.items() if name not in REPEATED},
    "gemma4-assistant": assistant,
    "gemma4-assistant-ordered": partial(assistant, centroids=16),
    "laguna": tiny_laguna,
    "nemotron": tiny_nemotron,
    "nemotron-dflash": partial(tiny_nemotron, dspark=False),
    **{f"llama-{name}": partial(tiny_eagle3_llama, config={"rope_scaling": rope, **PLAIN})
       for name, rope in ROPES.items()},
    "llama-parameters": partial(tiny_eagle3_llama, config={
        "rope_parameters": {**ROPES["llama3"], **PLAIN}, "rope_theta": None}),
    "mla-yarn": partial(tiny_eagle3_mla, config={"rope_scaling": ROPES["yarn"], **PLAIN}),
}  # fmt: skip


ADDED: Config = {
    "logit_scale": 2.0, "hot_vocab_size": 5, "dspark_draft_topk": 3, "dspark_bonus_anchor": True,
    "mla_use_qk_norm": True, "mla_use_nope": True, "mla_use_output_gate": True,
    "attention_bias": True, "qkv_bias": True, "mlp_bias": True, "hidden_act": "gelu",
    "use_sliding_window": True, "swa_attention_sink_enabled": True, "use_gemma_norm": True,
    "use_aux_hidden_state": False, "sample_from_anchor": True, "shift_label": True,
    "projector_type": "other", "markov_head_type": "other",
    "dspark_config": {}, "dflash_config": {},
    "conv_kernel_size": 3, "selector_rank": 3, "markov_rank": 3, "kv_lora_rank": 3,
    "attn_output_gate": False, "mtp_use_dedicated_embeddings": True, "norm_before_fc": True,
}  # fmt: skip
"""Keys that mean something to some family, and to others nothing."""
BOTH = ("is_neox_style", "rope_is_neox_style", "rope_interleave")


def others(config: Config) -> Iterator[tuple[str, Config]]:
    """Each key without its value or with another one, and all other keys as they are."""
    for key, value in config.items():
        rest = {name: own for name, own in config.items() if name != key}
        yield f"without {key}", rest
        if isinstance(value, dict):
            yield from ((f"{change} of {key}", {**rest, key: own}) for change, own in others(value))
        elif (another := changed(value)) != value:
            yield f"{key} {another}", {**rest, key: another}


def changed(value: Any) -> Any:
    """Another value of its kind."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value * 2
        case str():
            return f"{value}_"
        case [first, *_]:
            return [*value[:-1], changed(value[-1]) if len(value) > 1 else changed(first)]
    return value


def fields(draft: Any, config: Config) -> dict[str, str]:
    """What the family makes of config.json, by field; and what is odd about it."""
    found, lints = read_as(draft, config)
    lines = " ".join(lines_of(found.geometry, "geometry"))
    words = (word.partition("=") for word in lines.split(" ") if "=" in word)
    return {"family": found.family.name, "lints": " and ".join(lints)} | {
        key: own for key, _, own in words
    }


def tell(name: str, answers: Iterable[tuple[str, str]]) -> None:
    """Each answer with the changes that have it."""
    told = defaultdict[str, list[str]](list)
    for change, answer in answers:
        told[answer.partition("\n")[0]].append(change)
    lines = [f"{', '.join(changes)}: {answer}" for answer, changes in told.items()]
    check_told("each_key", {name: normal("\n".join(lines), exact=True)})


@pytest.mark.parametrize("build", BUILDERS)
def test_what_each_key_means(build: str, tmp_path: Path) -> None:
    draft = draft_of(BUILDERS[build](tmp_path / "draft"))
    before = fields(draft, draft.checkpoint.config)

    def answer(config: Config) -> str:
        try:
            after = fields(draft, config)
        except DraftQuantError as exc:
            return str(exc)
        differing = sorted(k for k in before.keys() | after if before.get(k) != after.get(k))
        return ", ".join(f"{key} {after.get(key, 'none')}" for key in differing)

    own = draft.checkpoint.config
    pairs = (*ADDED.items(), *product(BOTH, (True, False)))
    added = ((f"with {key} {new}", {**own, key: new}) for key, new in pairs if key not in own)
    inside = (
        (f"{section} with {key} {new}", {**own, section: {**own[section], key: new}})
        for section in ("eagle_config", "dflash_config") if section in own
        for key, new in pairs if key not in own[section]
    )  # fmt: skip
    answers = ((change, answer(config)) for change, config in (*others(own), *added, *inside))
    tell(build, (each for each in answers if each[1]))


@pytest.mark.parametrize(
    ("build", "engine"),
    [*((build, "vllm") for build in SERVED), *((build, "sglang") for build in SERVED[::3])],
)
def test_what_engines_do_with_each_key(build: str, engine: str, tmp_path: Path) -> None:
    draft = draft_of(BUILDERS[build](tmp_path / "draft"))
    asked = partial(check_config, draft, engine=engine, arch="sm90")

    def answer(config: Config) -> str:
        try:
            found = asked(config)
        except DraftQuantError:  # as the family says it
            return usual
        return f"{found.verdict}: {found.error or ''}".partition(" [Value")[0]

    usual = f"{asked(draft.checkpoint.config).verdict}: "
    changes = [each for each in others(draft.checkpoint.config) if not each[0][-1].isdecimal()]
    answers = ((change, answer(own)) for change, own in changes)  # sizes are those of tensors
    tell(f"{build} in {engine}, else {usual}", (each for each in answers if each[1] != usual))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_each_family_knows(family: Any) -> None:
    """Names: a folder with one that is missing here by mistake is refused. And rows on engines."""
    names = {prefix: family.canonical_name(f"{prefix}0.weight") for prefix, _ in family.prefixes}
    forms = {kind: list(form.architectures) for kind, form in family.speculators.items()}
    known = {"architectures": list(family.architectures), "names": names, "speculators": forms}
    known |= {"misnamed": dict(family.misnamed), "of others": dict(family.relatives)}
    known["engines"] = [*lines_of(family.engine_traits, "all")]
    check_told("families", {family.name: known})


@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "Qwen3_5MoeForConditionalGeneration"])
def test_beside_experts_that_quark_leaves_out_sglang_leaves_out_the_layer(name: str) -> None:
    """Of Qwen3.5, not of Qwen3-Next."""
    declared = {"exclude": ["lm_head", "mtp.layers.0.mlp.experts.0.up_proj"]}
    draft = Mock(method="quark", is_nvfp4_of_modelopt=False)
    draft.config = {"architectures": [name], "quantization_config": declared}
    (family,) = (family for family in FAMILIES if family.name == "qwen3-next-mtp")
    assert bool(family.engine_traits.sglang.mtp.floats(draft)) == ("3_5" in name)
