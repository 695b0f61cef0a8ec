"""A GPU that remembers what rules asked of it, so that GPUs that answer alike share a verdict."""

from typing_extensions import override


class AskedGpu:
    """An architecture, or several: rules compare it with names, and sentences name it.

    Attributes:
        arch: such as sm90; None = each that an engine is known on.
        name: for people, as `gpu_name` writes it.
    """

    def __init__(self, arch: str | None, name: str) -> None:
        """Nothing was asked yet."""
        self.arch, self.name = arch, name
        self._answers: dict[object, bool] = {}

    @override
    def __eq__(self, arch: object) -> bool:
        return self._answers.setdefault(arch, self.arch == arch)

    __hash__ = None  # type: ignore[assignment]

    @override
    def __str__(self) -> str:
        self._answers[self.arch] = True  # no other one is called so
        return self.name

    def is_like(self, other: "AskedGpu") -> bool:
        """Whether another one would have answered the same so far."""
        return all((other.arch == arch) == said for arch, said in self._answers.items())
