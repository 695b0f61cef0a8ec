"""What engines are told of every target's MTP layer in a folder of its own.

Loading was executed with the engines' own classes (`tests/engines/mtp.py`).
"""

from ...engine_traits import INPUTS, EngineTraits, InSglang, InVllm, MtpLayer

NO_PARAMETER = "KeyError: '{name}'"


def mtp_traits(
    architectures: frozenset[str],
    *,
    vllm: MtpLayer,
    sglang: MtpLayer,
    more_in_sglang: frozenset[str] = frozenset(),
) -> EngineTraits:
    """A family of MTP layers.

    Args:
        architectures: names in config.json, those of targets, for which loading was executed.
    """
    return EngineTraits(
        vllm=InVllm(
            architectures=architectures,
            served_as="mtp",
            biases=lambda _draft: (INPUTS, None),
            mtp=vllm,
        ),
        sglang=InSglang(
            architectures=architectures | more_in_sglang,
            served_as="EAGLE",
            biases=lambda _draft: (INPUTS, None),
            mtp=sglang,
        ),
    )
