"""What other tools write into config.json, and the tensors that go with it; one edit each."""

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
