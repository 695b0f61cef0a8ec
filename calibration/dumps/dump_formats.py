"""The layouts of dumps that are known, by the name of who writes them."""

from typing import Literal

DumpFormat = Literal["specforge", "torchspec", "speculators", "modelopt", "angelslim", "vllm"]
