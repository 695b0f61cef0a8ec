"""Keys of config.json without which the draft itself is not read: its name, its vocabulary."""

from ...drafts import read_config
from ...drafts.architectures import OTHER_NAMES, declared_architecture
from ...drafts.speculators_layout import is_speculators
from ...files.checkpoint import Checkpoint
from ..engine import Engine
from .repair import Outcome, Repair, with_config


def repair_architecture(checkpoint: Checkpoint, engine: Engine) -> Outcome:
    """A name of the architecture that `engine` has not becomes the one that it has.

    Raises:
        CheckpointError: config.json is not that of a draft.
    """
    name = declared_architecture(checkpoint.config)
    wanted = OTHER_NAMES.get(name)
    if wanted not in engine.architectures or name in engine.architectures:
        return Outcome(checkpoint=checkpoint)
    if wanted not in read_config(checkpoint)[0].architectures:  # a name of several kinds of drafts
        return Outcome(checkpoint=checkpoint)
    found = Repair(
        name="architecture",
        wrong=f"{engine.name} has no architecture {name}, which is another engine's name of it",
        written=f"architectures: {[wanted]}",
    )
    config = {**checkpoint.config, "architectures": [wanted]}
    return Outcome(checkpoint=with_config(checkpoint, config), repairs=(found,))


def repair_draft_vocabulary(checkpoint: Checkpoint) -> Outcome:
    """`draft_vocab_size` becomes the number of rows of d2t and of lm_head, where these agree.

    Raises:
        CheckpointError: config.json is not that of a draft.
    """
    family, geometry = read_config(checkpoint)
    rows = {
        canonical: tensor.shape[0]
        for name, tensor in checkpoint.tensors.items()
        if (canonical := family.canonical_name(name)) in ("d2t", "lm_head.weight") and tensor.shape
    }
    size, head = rows.get("d2t"), rows.get("lm_head.weight")
    if size is None or head not in (None, size) or size == geometry.draft_vocab_size:
        return Outcome(checkpoint=checkpoint)
    if is_speculators(checkpoint.config):  # of which the key is a part that only vLLM reads
        return Outcome(checkpoint=checkpoint)
    said = checkpoint.config.get("draft_vocab_size")
    found = Repair(
        name="draft-vocab-size",
        wrong=f"draft_vocab_size is {'missing' if said is None else said}, the draft's vocabulary"
        f" has {size} tokens (rows of d2t)",
        written=f"draft_vocab_size: {size}",
    )
    config = {**checkpoint.config, "draft_vocab_size": size}
    return Outcome(checkpoint=with_config(checkpoint, config), repairs=(found,))
