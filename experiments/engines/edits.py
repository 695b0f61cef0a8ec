"""What other tools and hands do to a draft folder, one edit each."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from formats import FamilyName
from tiny import Stored

SIDE_FILE = "hf_quant_config.json"
LAYER = "midlayer."
O_PROJ, DOWN_PROJ = f"{LAYER}self_attn.o_proj", f"{LAYER}mlp.down_proj"
Q_A_PROJ, KV_B_PROJ = f"{LAYER}self_attn.q_a_proj", f"{LAYER}self_attn.kv_b_proj"
QKV = tuple(f"{LAYER}self_attn.{part}_proj" for part in "qkv")
SHARED = ["embed_tokens", "fc", "lm_head"]


@dataclass(slots=True)
class Folder:
    """A quantized draft that is about to be broken."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Stored]
    source: dict[str, Stored]

    @property
    def quantization(self) -> dict[str, Any]:
        """The `quantization_config`."""
        found: dict[str, Any] = self.config["quantization_config"]
        return found

    def exclude(self, names: list[str]) -> None:
        """Declare exactly these as not quantized, in whichever key the layout has."""
        for key in ("exclude", "exclude_modules", "ignore", "ignored_layers"):
            if key in self.quantization:
                self.quantization[key] = names
        if "modules_to_not_convert" in self.quantization:
            self.quantization["modules_to_not_convert"] = names
        side_file = self.path / SIDE_FILE
        if side_file.is_file():
            content = json.loads(side_file.read_text(encoding="utf-8"))
            content["quantization"]["exclude_modules"] = names
            side_file.write_text(json.dumps(content), encoding="utf-8")

    def keep(self, *modules: str) -> None:
        """Store these linears as they were before quantization."""
        for module in modules:
            self.drop(module)
            self.tensors[f"{module}.weight"] = self.source[f"{module}.weight"]

    def drop(self, *prefixes: str) -> None:
        """Leave out every tensor whose name starts so."""
        for name in [name for name in self.tensors if name.startswith(prefixes)]:
            del self.tensors[name]

    def quantize_fp8(self, module: str) -> None:
        """Store a linear as FP8 per channel; its codes are zeros, which loading does not mind."""
        rows, columns = self.tensors[f"{module}.weight"].shape
        self.tensors[f"{module}.weight"] = Stored("F8_E4M3", (rows, columns), bytes(rows * columns))
        self.tensors[f"{module}.weight_scale"] = Stored("F32", (rows, 1), bytes(4 * rows))


Edit = Callable[[Folder], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A folder to make: a draft of `family` in these formats, then edited.

    `reads`: the target's layers whose inputs it then reads, where that is not what `READS` says.
    """

    name: str
    what: str
    formats: tuple[Any, str, str]
    edit: Edit
    family: FamilyName = "eagle3-llama"
    source: dict[str, Any] = field(default_factory=dict)
    reads: tuple[int, ...] | None = None


def excludes(*names: str) -> Edit:
    return lambda folder: folder.exclude(list(names))


def kept(*modules: str, exclude: list[str]) -> Edit:
    """Linears stored in BF16 and declared so, besides the ones that always are."""

    def edit(folder: Folder) -> None:
        folder.keep(*modules)
        declared = folder.quantization
        key = "ignore" if "ignore" in declared else "exclude"
        folder.exclude([*declared[key], *exclude])

    return edit


def without_config(folder: Folder) -> None:
    del folder.config["quantization_config"]


def side_file_only(folder: Folder) -> None:
    without_config(folder)
    assert (folder.path / SIDE_FILE).is_file()  # else this would be another case


def nested(folder: Folder) -> None:
    """hf_quant_config.json as quantization_config: what ModelOpt's exporter of drafts writes."""
    side_file = folder.path / SIDE_FILE
    folder.config["quantization_config"] = json.loads(side_file.read_text(encoding="utf-8"))
    side_file.unlink()


def without_method(folder: Folder) -> None:
    del folder.quantization["quant_method"]
    (folder.path / SIDE_FILE).unlink(missing_ok=True)


def side_file_disagrees(folder: Folder) -> None:
    path = folder.path / SIDE_FILE
    content = json.loads(path.read_text(encoding="utf-8"))
    content["quantization"]["exclude_modules"] = []
    path.write_text(json.dumps(content), encoding="utf-8")


def awq_per_channel(folder: Folder) -> None:
    """One group for the whole row, which AutoAWQ spells -1; values do not matter for loading."""
    folder.quantization["group_size"] = -1
    for name, tensor in folder.tensors.items():
        if name.endswith((".qzeros", ".scales")):
            shape = (1, tensor.shape[1])
            size = len(tensor.data) // tensor.shape[0]
            folder.tensors[name] = Stored(tensor.dtype, shape, tensor.data[:size])


def stray_bias(folder: Folder) -> None:
    rows = folder.source[f"{DOWN_PROJ}.weight"].shape[0]
    folder.tensors[f"{DOWN_PROJ}.bias"] = Stored("BF16", (rows,), bytes(2 * rows))


def kv_b_quantized(folder: Folder) -> None:
    folder.quantize_fp8(KV_B_PROJ)
    folder.exclude([name for name in folder.quantization["ignore"] if "kv_b_proj" not in name])


def fc_quantized(folder: Folder) -> None:
    folder.quantize_fp8("fc")
    folder.exclude([name for name in folder.quantization["ignore"] if "fc" not in name])


def head_quantized(folder: Folder) -> None:
    folder.quantize_fp8("lm_head")
    folder.exclude([name for name in folder.quantization["ignore"] if "lm_head" not in name])


def configure(key: str, value: object) -> Edit:
    return lambda folder: folder.config.update({key: value})


def declare(key: str, value: object) -> Edit:
    return lambda folder: folder.quantization.update({key: value})


def global_scales(q: float, k: float, v: float) -> Edit:
    """Global scales of the three parts of qkv_proj; 1 for gate and up."""

    def edit(folder: Folder) -> None:
        scales = dict(zip(QKV, (q, k, v), strict=True))
        scales |= {f"{LAYER}mlp.gate_proj": 1.0, f"{LAYER}mlp.up_proj": 1.0}
        for module, scale in scales.items():
            stored = Stored("F32", (), struct.pack("<f", scale))
            folder.tensors[f"{module}.weight_scale_2"] = stored

    return edit


def pack_order(folder: Folder) -> None:
    folder.quantization["export"]["pack_method"] = "order"


def input_norm_as(name: str) -> Edit:
    """The norm before the attention of the layers after the first, under another name."""

    def edit(folder: Folder) -> None:
        for old in [n for n in folder.tensors if n.startswith("layers.1.input_layernorm")]:
            new = old.replace("input_layernorm", name)
            folder.tensors[new] = folder.tensors.pop(old)

    return edit


def without_tied_head(folder: Folder) -> None:
    """Tied to the embedding, and no draft_vocab_size."""
    folder.drop("lm_head", "d2t", "t2d")
    folder.config["tie_word_embeddings"] = True
    del folder.config["draft_vocab_size"]


def other_vocabulary(folder: Folder) -> None:
    """The embedding lacks the last eight tokens."""
    table = folder.tensors["embed_tokens.weight"]
    rows, width = table.shape
    data = table.data[: (rows - 8) * width * 2]
    folder.tensors["embed_tokens.weight"] = Stored(table.dtype, (rows - 8, width), data)


def scales_with_axes(count: int) -> Edit:
    """Scales per channel as [out] or [out, 1]."""

    def edit(folder: Folder) -> None:
        for name, scale in folder.tensors.items():
            if name.endswith(".weight_scale"):
                shape = (scale.shape[0],) if count == 1 else (scale.shape[0], 1)
                folder.tensors[name] = Stored(scale.dtype, shape, scale.data)

    return edit


def under_another_key(folder: Folder) -> None:
    folder.config["compression_config"] = folder.config.pop("quantization_config")


def unquantized_with_empty_config(folder: Folder) -> None:
    """The plain draft, with a quantization_config that says nothing."""
    folder.tensors = dict(folder.source)
    folder.config["quantization_config"] = {}


def unquantized(folder: Folder) -> None:
    """The plain draft: what is wrong with it is in its source."""
    folder.tensors = dict(folder.source)
    del folder.config["quantization_config"]
