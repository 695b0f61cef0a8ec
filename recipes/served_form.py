"""What an engine makes of a draft's folder when it is told to, beyond what the folder declares."""

from dataclasses import dataclass

from .formats import KvCacheDtype, OnlineHead


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedForm:
    """Options of an engine that make another draft of the same folder.

    Attributes:
        online_head: what vLLM makes of the head while it loads (`draft_lm_head_quantization`).
        kv_cache: the format of the KV cache, by the engine's option for a draft's; None = what the
            folder declares.
    """

    online_head: OnlineHead | None = None
    kv_cache: KvCacheDtype | None = None

    @property
    def changes(self) -> bool:
        """The folder alone is not what is served."""
        return self != AS_STORED

    def label(self, name: str) -> str:
        """The name of a draft as reports have it: served otherwise it is another draft."""
        if self.online_head is not None:
            name = f"{name}, head {self.online_head} online"
        if self.kv_cache is not None:
            name = f"{name}, KV cache {self.kv_cache}"
        return name


AS_STORED = ServedForm()
