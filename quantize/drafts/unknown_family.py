"""The draft that no family reads: roles by names and shapes, and no maths.

Its tensors are planned, quantized, verified and stored anew; what needs what the draft computes is
refused. `roles.toml` has the rules, and `--role PATTERN=ROLE` goes before them.
"""

import difflib
import fnmatch
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from ...recipes.errors import CheckpointError
from ...recipes.packages import table_beside
from ...recipes.schema import Role
from ..files.checkpoint import CONFIG_FILE, Checkpoint
from ..files.provenance_file import quantization_of, read_provenance
from ..files.safetensors_header import TensorInfo
from .config_reader import ConfigReader, with_text_config
from .family import Dim, Draft, Family, Row, TensorSpec
from .geometry import Geometry

_RULES: Sequence[Mapping[str, typing.Any]] = table_beside(__file__, "roles")["rules"]
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|mtp_layers|mtp)\.(\d+)\.")
UNNAMED = ""
"""The rule of a tensor that no rule names."""


@dataclass(frozen=True, slots=True)
class GivenRole:
    """What `--role PATTERN=ROLE` says."""

    pattern: str
    role: Role

    @classmethod
    def read(cls, text: str) -> "GivenRole":
        """CheckpointError for one without a pattern, or whose role is none."""
        pattern, _, role = text.rpartition("=")
        known = typing.get_args(Role)
        if not pattern or role not in known:
            raise CheckpointError(
                "--role",
                f"{text!r}: expected PATTERN=ROLE, where ROLE is one of {', '.join(known)}",
                fix="write for example --role '*.dense.weight=mlp'",
            )
        return cls(pattern, typing.cast(Role, role))


class UnknownFamily(Family):
    """The drafts that no family reads: one object for each folder, whose tensors are its table."""

    name = "unknown"
    architectures = ()
    prefixes = ()
    served_unquantized = ("embed_tokens", "fc", "lm_head")
    makes_features = ()
    marks = frozenset()
    has_maths = False
    shared_tables = ()
    whole_vocabulary = "draftquant does not know how this draft uses its head"
    no_cache_scales = "draftquant does not know its attention"

    def __init__(self, kind: str, checkpoint: Checkpoint) -> None:
        """`kind`: what the draft is, as far as its names tell."""
        self.notice = (
            f"family unknown: draftquant has no maths of this draft ({kind}). Its tensors have"
            " their roles by rules for names, which 'inspect' lists; nothing is replayed"
        )
        self.given = tuple(
            map(GivenRole.read, checkpoint.roles or recorded_roles(checkpoint.folder))
        )
        self._tensors = checkpoint.tensors

    def role(self, tensor: TensorInfo) -> tuple[Role, str]:
        """The role of a tensor and the rule that gave it: `UNNAMED` where none did."""
        for given in self.given:
            if fnmatch.fnmatchcase(tensor.name, given.pattern):
                return given.role, f"--role {given.pattern}={given.role}"
        for row in _RULES:
            if row.get("dims", len(tensor.shape)) == len(tensor.shape) and re.search(
                row["name"], tensor.name
            ):
                return row["role"], row["rule"]
        return "other", UNNAMED

    @override
    def geometry(self, keys: ConfigReader) -> Geometry:
        config = with_text_config(keys.config)
        sizes = {key: value for key, value in config.items() if type(value) is int and value > 0}
        hidden, vocab = sizes.get("hidden_size", 0), sizes.get("vocab_size", 0)
        layers = {match[1] for name in self._tensors if (match := _LAYER.search(name))}
        return Geometry(
            hidden_size=hidden,
            intermediate_size=sizes.get("intermediate_size", 0),
            num_layers=max(1, len(layers)),
            num_attention_heads=sizes.get("num_attention_heads", 0),
            vocab_size=vocab,
            draft_vocab_size=sizes.get("draft_vocab_size", vocab),
            target_hidden_size=hidden,
            num_aux_layers=1,
            aux_layer_ids=None,
            rms_norm_eps=0.0,
            rope=None,
            fuses=False,
        )

    @override
    def tensor_specs(self, geometry: Geometry) -> Mapping[str, TensorSpec]:
        return {
            name: TensorSpec(
                role=self.role(tensor)[0],
                shape=tuple(Dim(size, "the tensor") for size in tensor.shape),
                dtypes=(tensor.dtype,),
            )
            for name, tensor in self._tensors.items()
        }


def recorded_roles(folder: Path) -> tuple[str, ...]:
    """What `--role` said when a folder was made, by its draftquant.json."""
    made = quantization_of(read_provenance(folder))
    return made.roles if made is not None else ()


def read_unknown(checkpoint: Checkpoint, kind: str) -> Draft:
    """A draft that no family reads: every tensor with its role, and the rule that gave it.

    CheckpointError: a role is given to no tensor.
    """
    family = UnknownFamily(kind, checkpoint)
    geometry = family.read_geometry(checkpoint.config, checkpoint.folder / CONFIG_FILE)
    for given in family.given:
        if not fnmatch.filter(checkpoint.tensors, given.pattern):
            wanted = given.pattern.replace("*", "")
            near = difflib.get_close_matches(wanted, checkpoint.tensors, 3, cutoff=0.0)
            raise CheckpointError(
                checkpoint.folder,
                f"--role {given.pattern!r} fits no tensor; nearest: {', '.join(near)}",
                fix="correct the pattern: * stands for anything, and names are those that inspect"
                " lists",
            )
    roles = ((tensor, family.role(tensor)) for tensor in checkpoint.tensors.values())
    rows = tuple(
        Row(tensor=tensor, canonical=tensor.name, role=role, given=rule)
        for tensor, (role, rule) in roles
    )
    return Draft(checkpoint=checkpoint, family=family, geometry=geometry, rows=rows)
