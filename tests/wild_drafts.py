"""Published drafts as folders: the config.json of each, and tensors of the names and shapes it has.

`wild/drafts.json` holds facts only, one entry a line: the name of the draft, where the facts are
from, the keys of its config.json that anyone reads, and how its tensors are named. Weights are
random in a folder that is divided (every width is), and holes of the real size in one that is not.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tiny import Stored, store, write_tensors

DRAFTS_FILE = Path(__file__).resolve().parent / "wild" / "drafts.json"
Shapes = dict[str, tuple[int, ...]]
_WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "draft_vocab_size",
    "head_dim",
    "target_hidden_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
_SECTIONS = ("transformer_layer_config", "dflash_config", "text_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class WildDraft:
    """One entry of the list.

    Attributes:
        name: as it is published, or of the config of its trainer.
        source: where the facts are from.
        config: the keys of its config.json that are read by anyone.
        tensors: "kind" of draft, "first": prefix of its first layer, "has": optional tensors,
            "without": modules that it lacks, "spelling": of a trainer's own names, "layers": their
            number where it is not the config's.
    """

    name: str
    source: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Any]

    def write(self, folder: Path, *, divide: int = 1) -> Path:
        """Write the draft as a folder.

        Args:
            folder: created; its parent must exist.
            divide: of every width. 1 = the real sizes, in a file without data: a hole.
        """
        config = _divided(self.config, divide)
        shapes = shapes_of(self, config)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        if divide == 1:
            _write_hole(folder / "model.safetensors", shapes)
        else:
            write_tensors(folder, _random(shapes), metadata={"format": "pt"})
        return folder


def wild_drafts() -> tuple[WildDraft, ...]:
    """The whole list, in the order of the file."""
    entries = json.loads(DRAFTS_FILE.read_text(encoding="utf-8"))
    return tuple(
        WildDraft(name=e["draft"], source=e["source"], config=e["config"], tensors=e["tensors"])
        for e in entries
    )


def shapes_of(draft: WildDraft, config: Mapping[str, Any]) -> Shapes:
    """Tensor name -> shape."""
    layers = {**config, **config.get("transformer_layer_config", {})}
    return _KINDS[draft.tensors["kind"]](draft.tensors, layers)


def _divided(config: Mapping[str, Any], divide: int) -> dict[str, Any]:
    found = dict(config)
    for key in _WIDTHS:
        if isinstance(found.get(key), int):
            found[key] = -(-found[key] // divide)
    if "mask_token_id" in found:
        found["mask_token_id"] //= divide
    for section in _SECTIONS:
        if section in found:
            found[section] = _divided(found[section], divide)
    return found


def _vocabularies(config: Mapping[str, Any]) -> tuple[int, int]:
    vocab = config["vocab_size"]
    return vocab, config.get("draft_vocab_size") or vocab


def _tables(has: list[str], config: Mapping[str, Any], outer: str = "") -> Shapes:
    vocab, own = _vocabularies(config)
    hidden = config["hidden_size"]
    every: Shapes = {
        "embed_tokens": (vocab, hidden),
        "lm_head": (own, hidden),
        "d2t": (own,),
        "t2d": (vocab,),
    }
    names = {"embed_tokens": f"{outer}embed_tokens.weight", "lm_head": "lm_head.weight"}
    return {names.get(name, name): every[name] for name in has if name in every}


def _attention(config: Mapping[str, Any], width: int, *, normed: bool = False) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    keys = config.get("num_key_value_heads", heads) * head
    norms: Shapes = {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)} if normed else {}
    return {
        "self_attn.q_proj": (heads * head, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (hidden, heads * head),
        **norms,
    }


def _latent_attention(config: Mapping[str, Any], width: int) -> Shapes:
    c, heads = config, config["num_attention_heads"]
    query = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    keys_values = heads * (c["qk_nope_head_dim"] + c["v_head_dim"])
    return {
        "self_attn.q_a_proj": (c["q_lora_rank"], width),
        "self_attn.q_a_layernorm": (c["q_lora_rank"],),
        "self_attn.q_b_proj": (heads * query, c["q_lora_rank"]),
        "self_attn.kv_a_proj_with_mqa": (c["kv_lora_rank"] + c["qk_rope_head_dim"], width),
        "self_attn.kv_a_layernorm": (c["kv_lora_rank"],),
        "self_attn.kv_b_proj": (keys_values, c["kv_lora_rank"]),
        "self_attn.o_proj": (c["hidden_size"], heads * c["v_head_dim"]),
    }


def _mlp(config: Mapping[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    return {
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }


def _weights(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def _num_features(config: Mapping[str, Any]) -> int:
    nested = config.get("eagle_config", {})
    key = "eagle_aux_hidden_state_layer_ids"
    ids = config.get(key) or nested.get(key) or [0, 0, 0]
    return len(ids) * (config.get("target_hidden_size") or config["hidden_size"])


def _eagle3(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    has, first, hidden = tensors["has"], tensors["first"], config["hidden_size"]
    outer = "model." if first.startswith("model.") else ""
    features = _num_features(config)
    found = _tables(has, config, outer) | {f"{outer}norm.weight": (hidden,)}
    if "fc" not in tensors.get("without", ()):
        found[f"{outer}fc.weight"] = (hidden, features)
    if "input_norm" in has:
        found[f"{outer}input_norm.weight"] = (features,)
    if "fc_norm" in has:
        found |= {f"{outer}fc_norm.{i}.weight": (features // 3,) for i in range(3)}
    if "mask_hidden" in has:
        found["mask_hidden"] = (1, 1, features)
    for i in range(tensors.get("layers", config["num_hidden_layers"])):
        width = 2 * hidden if i == 0 else hidden
        attention = (
            _latent_attention(config, width)
            if tensors["kind"] == "eagle3-mla"
            else _attention(config, width, normed="qk_norm" in has)
        )
        layer = attention | _mlp(config) | ({"hidden_norm": (hidden,)} if i == 0 else {})
        found |= _weights(first if i == 0 else f"{outer}layers.{i}.", layer)
    return found


def _eagle3_moe(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    dense = _eagle3(tensors, config)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    found = {name: shape for name, shape in dense.items() if ".mlp." not in name}
    first = tensors["first"]
    found[f"{first}mlp.router.weight"] = (16, hidden)
    found[f"{first}mlp.experts.gate_up_proj"] = (16, hidden, 2 * inner)
    return found


def _peagle(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    return _eagle3({**tensors, "has": [*tensors["has"], "mask_hidden"]}, config)


def _dflash(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    section = {**config, **config.get("dflash_config", {})}
    ids = section.get("target_layer_ids") or section["aux_hidden_state_layer_ids"]
    hidden = config["hidden_size"]
    names = {"fc": "fc", "hidden_norm": "hidden_norm", "norm": "norm"}
    if tensors.get("spelling") == "torchspec":
        names = {"fc": "context_proj", "hidden_norm": "context_norm", "norm": "final_norm"}
    width = config.get("target_hidden_size") or hidden
    found = _tables(tensors["has"], config) | {
        f"{names['fc']}.weight": (hidden, len(ids) * width),
        f"{names['hidden_norm']}.weight": (hidden,),
        f"{names['norm']}.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        layer = _attention(config, hidden, normed=True) | _mlp(config)
        found |= _weights(f"layers.{i}.", layer)
    return found


def _dspark(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    vocab, own = _vocabularies(config)
    rank = config.get("dflash_config", config).get("markov_rank", 256)
    return _dflash(tensors, config) | {
        "markov_head.markov_w1.weight": (vocab, rank),
        "markov_head.markov_w2.weight": (own, rank),
        "confidence_head.proj.weight": (1, config["hidden_size"] + rank),
    }


def _domino(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    return _dflash(tensors, config) | {
        "prefix_gru.weight_ih_l0": (3 * 1024, hidden),
        "prefix_gru.weight_hh_l0": (3 * 1024, 1024),
        "embed_proj.0.weight": (256, hidden + 1024),
        "embed_proj.2.weight": (config["vocab_size"], 256),
    }


def _dflash2(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    hidden, vocab, own = config["hidden_size"], config["vocab_size"], config["dflash_config"]
    taps, rank = own["conv_kernel_size"], own["selector_rank"]
    added = 2 * taps * hidden // own["conv_group_size"]
    convolutions: Shapes = {
        f"layers.{i}.{conv}.{name}": shape
        for i in range(config["num_hidden_layers"])
        for conv in ("attention_conv", "mlp_conv")
        for name, shape in {
            "base_kernel": (2, taps, hidden),
            "kernel_projection.weight": (added, hidden),
        }.items()
    }
    return {
        **_dflash(tensors, config),
        **convolutions,
        "candidate_selector.predecessor_codebook": (vocab, rank),
        "candidate_selector.successor_codebook": (vocab, rank),
        "candidate_selector.hidden_projection.weight": (rank, hidden),
    }


def _eagle1(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    layer = _attention(config, hidden) | _mlp(config)
    del layer["input_layernorm"]
    fc: Shapes = {"fc.weight": (hidden, 2 * hidden)}
    return _tables(tensors["has"], config) | fc | _weights("layers.0.", layer)


def _nextn(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    layer = _latent_attention(config, hidden) | _mlp(config)
    own: Shapes = {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden)}
    own["shared_head.norm"] = (hidden,)
    return _tables(tensors["has"], config) | _weights("model.layers.0.", layer | own)


def _step3p5(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    heads = config["attention_other_setting"]["num_attention_heads"]
    sizes = {"num_attention_heads": heads, "num_key_value_heads": config["num_attention_groups"]}
    layer = _attention({**config, **sizes}, hidden, normed=True) | _mlp(config)
    own: Shapes = {
        "self_attn.g_proj": (heads, hidden),
        "eh_proj": (hidden, 2 * hidden),
        "enorm": (hidden,),
        "hnorm": (hidden,),
        "transformer.shared_head.norm": (hidden,),
        "transformer.shared_head.output": (vocab, hidden),
    }
    found = _tables(tensors["has"], config)
    for i in range(config["num_nextn_predict_layers"]):
        found |= _weights(f"model.layers.{config['num_hidden_layers'] + i}.", layer | own)
    return found


def _qwen3_next_mtp(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    config = config.get("text_config", config)
    hidden, experts = config["hidden_size"], config.get("num_experts", 0)
    layer = _attention(config, hidden, normed=True) | _mlp(config)
    layer["self_attn.q_proj"] = (2 * config["num_attention_heads"] * config["head_dim"], hidden)
    if experts:
        layer = {name: shape for name, shape in layer.items() if not name.startswith("mlp.")}
        layer |= {"mlp.gate": (experts, hidden), "mlp.shared_expert_gate": (1, hidden)}
        inner, shared = config["moe_intermediate_size"], config["shared_expert_intermediate_size"]
        blocks = {f"experts.{i}": inner for i in range(experts)} | {"shared_expert": shared}
        for block, width in blocks.items():
            layer |= {
                f"mlp.{block}.gate_proj": (width, hidden),
                f"mlp.{block}.up_proj": (width, hidden),
                f"mlp.{block}.down_proj": (hidden, width),
            }
    norms: Shapes = {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.norm.weight": (hidden,),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
    }
    return _tables(tensors["has"], config) | norms | _weights("mtp.layers.0.", layer)


def _medusa(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    """One block to a head; sizes that config.json lacks stand beside the kind."""
    sizes = {**tensors, **config}
    hidden, found = sizes["hidden_size"], {}
    for i in range(sizes.get("num_heads") or sizes["heads"]):
        found[f"{i}.0.linear.weight"] = (hidden, hidden)
        found[f"{i}.0.linear.bias"] = (hidden,)
        found[f"{i}.1.weight"] = (sizes["vocab_size"], hidden)
    return found


def _causal_lm(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    found = _tables(tensors["has"], config, "model.") | {"model.norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        found |= _weights(f"model.layers.{i}.", _attention(config, hidden) | _mlp(config))
    return found


_KINDS = {
    "eagle3-llama": _eagle3,
    "eagle3-mla": _eagle3,
    "eagle3-moe": _eagle3_moe,
    "peagle": _peagle,
    "dflash": _dflash,
    "dspark": _dspark,
    "domino": _domino,
    "dflash2": _dflash2,
    "eagle1": _eagle1,
    "deepseek-mtp": _nextn,
    "qwen3-next-mtp": _qwen3_next_mtp,
    "step3p5-mtp": _step3p5,
    "medusa": _medusa,
    "causal-lm": _causal_lm,
}


def _dtype(name: str) -> str:
    return {"d2t": "I64", "t2d": "BOOL"}.get(name, "BF16")


def _random(shapes: Shapes) -> dict[str, Stored]:
    rng = np.random.default_rng(0)
    found = {}
    for name, shape in shapes.items():
        if name == "d2t":
            found[name] = Stored("I64", shape, bytes(8 * shape[0]))
        elif name == "t2d":
            kept = np.arange(shape[0]) < shapes["d2t"][0]
            found[name] = Stored("BOOL", shape, kept.tobytes())
        elif len(shape) == 1:
            found[name] = store(1 + 0.1 * rng.standard_normal(shape, dtype=np.float32), "BF16")
        else:
            found[name] = store(0.1 * rng.standard_normal(shape, dtype=np.float32), "BF16")
    return found


def _write_hole(path: Path, shapes: Shapes) -> None:
    """A safetensors file whose data is a hole: gigabytes that need no disk."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size = {"I64": 8, "BOOL": 1, "BF16": 2}[_dtype(name)]
        start, end = end, end + size * int(np.prod(shape))
        header[name] = {"dtype": _dtype(name), "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        if "t2d" in header:  # the first tokens, as d2t without offsets says
            file.seek(8 + len(text) + header["t2d"]["data_offsets"][0])
            file.write(b"\1" * shapes["d2t"][0])
