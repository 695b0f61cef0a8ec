"""Published drafts as folders: the config.json of each, and tensors of the names and shapes it has.

`wild/drafts.json` holds facts only, one entry a line: the name of the draft, where the facts are
from, the keys of its config.json that anyone reads, and how its tensors are named. Weights are
random in a folder that is divided (every width is), and holes of the real size in one that is not.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiny_shapes as shapes
from tiny import Drawn, write_tensors
from tiny_dflash import spelled
from tiny_shapes import Shapes

DRAFTS_FILE = Path(__file__).resolve().parent / "wild" / "drafts.json"
_WIDTHS = (
    "hidden_size", "intermediate_size", "vocab_size", "draft_vocab_size", "head_dim",
    "target_hidden_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "moe_intermediate_size", "shared_expert_intermediate_size", "n_routed_experts",
)  # fmt: skip
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
            number where it is not the config's; of kind "listed" the "shapes", see `_listed`, and
            the kind in tests/test_rope.py that its rope is "like".
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
        found = shapes_of(self, config)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        if divide == 1:
            _write_hole(folder / "model.safetensors", found)
        else:
            vocab = found.get("t2d", (0,))[0]
            write_tensors(folder, Drawn(0).tensors(found, vocab=vocab), metadata={"format": "pt"})
        return folder


def wild_drafts() -> tuple[WildDraft, ...]:
    """The whole list, in the order of the file."""
    return tuple(
        WildDraft(name=e["draft"], source=e["source"], config=e["config"], tensors=e["tensors"])
        for e in json.loads(DRAFTS_FILE.read_text(encoding="utf-8"))
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
    if "n_group" in found:  # two experts of a group are looked at
        found["n_routed_experts"] = max(found["n_routed_experts"], 2 * found["n_group"])
    if "mask_token_id" in found:
        found["mask_token_id"] //= divide
    for section in _SECTIONS:
        if section in found:
            found[section] = _divided(found[section], divide)
    return found


def _eagle3(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    key = "eagle_aux_hidden_state_layer_ids"
    ids = config.get(key) or config.get("eagle_config", {}).get(key) or [0, 0, 0]
    features = len(ids) * (config.get("target_hidden_size") or config["hidden_size"])
    own = {"latent": tensors["kind"] == "eagle3-mla", "layers": tensors.get("layers")}
    found = shapes.eagle3(config, tensors["has"], tensors["first"], features=features, **own)
    without = {f"{module}.weight" for module in tensors.get("without", ())}
    return {name: s for name, s in found.items() if name.removeprefix("model.") not in without}


def _eagle3_moe(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    found = {name: s for name, s in _eagle3(tensors, config).items() if ".mlp." not in name}
    first, hidden, inner = tensors["first"], config["hidden_size"], config["intermediate_size"]
    found[f"{first}mlp.router.weight"] = (16, hidden)
    return found | {f"{first}mlp.experts.gate_up_proj": (16, hidden, 2 * inner)}


def _eagle4(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    """The head that candidates are chosen by stands beside the one that scores them."""
    rank, vocab = config["efficient_lm_head_config"]["rank"], config["vocab_size"]
    return _eagle3(tensors, config) | {
        "efficient_lm_head.weight": (vocab, rank),
        "efficient_lm_head_down_proj.weight": (rank, config["hidden_size"]),
    }


def _peagle(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    return _eagle3({**tensors, "has": [*tensors["has"], "mask_hidden"]}, config)


def _dflash(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    section = {**config, **config.get("dflash_config", {})}
    ids = section.get("target_layer_ids") or section["aux_hidden_state_layer_ids"]
    features = len(ids) * (config.get("target_hidden_size") or config["hidden_size"])
    own = config["dflash_config"] if tensors["kind"] == "dflash2" else None
    found = shapes.dflash(config, tensors["has"], features=features, own=own)
    return {spelled(name, tensors.get("spelling", "")): shape for name, shape in found.items()}


def _laguna(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    ids = config["dflash_config"]["target_layer_ids"]
    return shapes.laguna(config, tensors["has"], layers=len(ids))


def _dspark(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    rank = {**config, **config.get("dflash_config", {})}.get("markov_rank", 256)
    heads = shapes.dspark(config, rank)
    without = tuple(tensors.get("without", ()))
    return _dflash(tensors, config) | {n: s for n, s in heads.items() if not n.startswith(without)}


def _domino(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    return _dflash(tensors, config) | {
        "prefix_gru.weight_ih_l0": (3 * 1024, hidden),
        "prefix_gru.weight_hh_l0": (3 * 1024, 1024),
        "embed_proj.0.weight": (256, hidden + 1024),
        "embed_proj.2.weight": (config["vocab_size"], 256),
    }


def _eagle1(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    layer = shapes.attention(config, hidden) | shapes.mlp(config)
    del layer["input_layernorm"]
    found = shapes.tables(config, tensors["has"]) | shapes.named("layers.0.", layer)
    return found | {"fc.weight": (hidden, 2 * hidden)}


def _nextn(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    """Of SGLang's export, or as it is numbered in its target."""
    hidden, alone = config["hidden_size"], config["architectures"][0].endswith("NextN")
    number = 0 if alone else config["num_hidden_layers"]
    own = shapes.latent_attention(config, hidden)
    own |= shapes.indexer(config, hidden) if "index_topk" in config else {}
    layer = shapes.nextn(config, own, config.get("n_routed_experts", 0))
    return shapes.tables(config, tensors["has"]) | shapes.named(f"model.layers.{number}.", layer)


def _step3p5(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    first, modules = config["num_hidden_layers"], config["num_nextn_predict_layers"]
    return shapes.tables(config, tensors["has"]) | shapes.step3p5_mtp(config, first, modules)


def _qwen3_next_mtp(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    config = config.get("text_config", config)
    own = shapes.qwen3_next_mtp(config, config.get("num_experts", 0))
    return shapes.tables(config, tensors["has"]) | own


def _listed(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    """Names and shapes as the entry itself spells them, for kinds that have one draft each.

    "{N}" in a name counts from 0; a size is a sum of products of keys and numbers.
    """
    sizes = {**config, **config.get("text_config", {})}

    def value(word: str) -> int:
        return int(word) if word.isdigit() else int(sizes[word])

    def size(text: str) -> int:
        return sum(int(np.prod([value(w) for w in term.split("*")])) for term in text.split("+"))

    def names(pattern: str) -> Iterator[str]:
        if (counted := re.search(r"\{(\w+)\}", pattern)) is None:
            yield pattern
            return
        for i in range(value(counted[1])):
            yield from names(f"{pattern[: counted.start()]}{i}{pattern[counted.end() :]}")

    shapes = tensors["shapes"].items()
    return {each: tuple(map(size, shape)) for name, shape in shapes for each in names(name)}


def _medusa(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    """One block to a head; sizes that config.json lacks stand beside the kind."""
    sizes = {**tensors, **config}
    hidden, found = sizes["hidden_size"], {}
    for i in range(sizes.get("num_heads") or sizes["heads"]):
        found[f"{i}.0.linear.weight"] = (hidden, hidden)
        found[f"{i}.0.linear.bias"] = (hidden,)
        found[f"{i}.1.weight"] = (sizes["vocab_size"], hidden)
    return found


_KINDS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Shapes]] = {
    "eagle4": _eagle4, "eagle3-llama": _eagle3, "eagle3-mla": _eagle3,
    "eagle3-moe": _eagle3_moe, "peagle": _peagle,
    "dflash": _dflash, "dspark": _dspark, "domino": _domino, "dflash2": _dflash,
    "laguna-dflash": _laguna,
    "eagle1": _eagle1, "deepseek-mtp": _nextn, "qwen3-next-mtp": _qwen3_next_mtp,
    "step3p5-mtp": _step3p5, "medusa": _medusa, "listed": _listed,
    "causal-lm": lambda tensors, config: shapes.causal_lm(config, tensors["has"]),
}  # fmt: skip


def _dtype(name: str) -> str:
    return {"d2t": "I64", "t2d": "BOOL"}.get(name, "BF16")


def _write_hole(path: Path, found: Shapes) -> None:
    """A safetensors file whose data is a hole: gigabytes that need no disk."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in found.items():
        start, end = end, end + {"I64": 8, "BOOL": 1, "BF16": 2}[_dtype(name)] * int(np.prod(shape))
        header[name] = {"dtype": _dtype(name), "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        if "t2d" in header:  # the first tokens, as d2t without offsets says
            file.seek(8 + len(text) + header["t2d"]["data_offsets"][0])
            file.write(b"\1" * found["d2t"][0])
