"""What a run cost: counts, seconds and bytes, filled in by the engine and shown by the commands."""

from dataclasses import dataclass


@dataclass
class Stats:
    """Totals since the engine was opened.

    Opening took `load_s`, `lock_s` for locking pages, and `compile_s` of waiting for kernels that compile meanwhile;
    those that compile on their first use count there, too, and nowhere else. `n_reused` prompt tokens were still in the
    cache.
    Of `n_routed` uses of host experts in decoding `n_cached` were in the expert cache; it saved the link `saved_bytes`.
    """

    load_s: float = 0.0
    lock_s: float = 0.0
    n_prompt: int = 0
    n_reused: int = 0
    prefill_s: float = 0.0
    n_decoded: int = 0
    decode_s: float = 0.0
    compile_s: float = 0.0
    uploaded_bytes: int = 0
    n_routed: int = 0
    n_cached: int = 0
    saved_bytes: int = 0

    @property
    def prefill_tps(self) -> float:
        return self.n_prompt / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tps(self) -> float:
        return self.n_decoded / self.decode_s if self.decode_s else 0.0
