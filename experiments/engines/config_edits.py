"""What other tools write into config.json, and the tensors that go with it; one edit each."""

from typing import Any

from edits import LAYER, Edit, Folder
from tiny import Stored


def named(name: str, *, normed_heads: bool = False, model_type: str | None = None) -> Edit:
    """Another architecture; with the norms of queries and keys that layers of Qwen3 have."""

    def edit(folder: Folder) -> None:
        folder.config["architectures"] = [name]
        if model_type is not None:
            folder.config["model_type"] = model_type
        if normed_heads:
            add_head_norms(folder)

    return edit


def add_head_norms(folder: Folder) -> None:
    """q_norm and k_norm of the first layer; of ones."""
    size = folder.config["head_dim"]
    for leaf in ("q_norm", "k_norm"):
        name = f"{LAYER}self_attn.{leaf}.weight"
        folder.tensors[name] = Stored("BF16", (size,), b"\x80\x3f" * size)


def both(*edits: Edit) -> Edit:
    """One after the other."""

    def edit(folder: Folder) -> None:
        for each in edits:
            each(folder)

    return edit


_OF_LAYERS = (
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
)


def speculators(model_type: str = "llama", *, inside: bool = False, without: str = "") -> Edit:
    """The same draft in the layout of speculators 0.9.0.

    Args:
        model_type: of its layers; of DFlash, "qwen3".
        inside: the declaration stands beside the keys of the layers.
        without: a key to leave out, at the top or of the layers.
    """

    def edit(folder: Folder) -> None:
        config = dict(folder.config)
        kind = "dflash" if "dflash_config" in config else "eagle3"
        layers = {key: config[key] for key in _OF_LAYERS} | {
            "model_type": model_type,
            "hidden_act": "silu",
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "tie_word_embeddings": False,
        }
        method = {"proposal_type": "greedy", "speculative_tokens": 3}
        own: dict[str, Any] = {
            "architectures": [f"{'DFlash' if kind == 'dflash' else 'Eagle3'}Speculator"],
            "draft_vocab_size": config.get("draft_vocab_size"),
            "dtype": "bfloat16",
            "speculators_config": {
                "algorithm": kind,
                "proposal_methods": [method],
                "verifier": {"architectures": [], "name_or_path": "owner/target"},
            },
            "speculators_model_type": kind,
            "target_hidden_size": None,
            "transformer_layer_config": layers,
        }
        if kind == "dflash":
            nested = config["dflash_config"]
            own["aux_hidden_state_layer_ids"] = [i + 1 for i in nested["target_layer_ids"]]
            own["mask_token_id"] = nested["mask_token_id"]
            own["block_size"] = nested.get("block_size", config.get("block_size"))
        else:
            own |= {"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "norm_before_residual": True}
        if "quantization_config" in config:
            where = layers if inside else own
            where["quantization_config"] = config["quantization_config"]
        own.pop(without, None)
        layers.pop(without, None)
        folder.config.clear()
        folder.config.update(own)

    return edit


def without_key(key: str) -> Edit:
    return lambda folder: folder.config.pop(key)


def plain_norms(*names: str, width: int = 1) -> Edit:
    """Norms of ones, as wide as so many hidden states; EAGLE-3.1 has them before fc."""

    def edit(folder: Folder) -> None:
        size = width * folder.config["hidden_size"]
        for name in names:
            folder.tensors[f"{name}.weight"] = Stored("BF16", (size,), b"\x80\x3f" * size)

    return edit


def quantized(*modules: str) -> Edit:
    """Weights stored as FP8 codes with scales, whatever they are."""

    def edit(folder: Folder) -> None:
        for module in modules:
            folder.quantize_fp8(module)

    return edit


def as_fnuz(folder: Folder) -> None:
    """The FP8 codes of AMD's older GPUs: the same bits, worth half as much."""
    for name, tensor in folder.tensors.items():
        if tensor.dtype == "F8_E4M3":
            folder.tensors[name] = tensor._replace(dtype="F8_E4M3FNUZ")
