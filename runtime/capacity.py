"""How many slots memory holds, asked before anything is allocated, so that the message can say what to change."""

from __future__ import annotations

import os

from trtllm_replayssm.errors import ConfigError


def require_slots(max_batch_size: int, max_seq_len: int, max_tokens: int | None) -> None:
    """Raise ConfigError when max_batch_size sequences of max_seq_len positions exceed KvCacheConfig.max_tokens."""
    if max_tokens is None:
        return
    slots = max_tokens // max_seq_len
    if max_batch_size > slots:
        raise ConfigError(
            "LLM",
            "max_batch_size",
            expected=f"at most {slots} slots (KvCacheConfig.max_tokens={max_tokens} / max_seq_len={max_seq_len})",
            got=max_batch_size,
            hint="Lower max_batch_size or max_seq_len, or raise max_tokens",
        )


def prefix_budget(asked: int | None, snapshot_bytes: int) -> int:
    """Bytes for a prefix cache: as asked for, or a quarter of the free host memory (1 GiB where it is not known).

    Raises ConfigError when that cannot hold one snapshot of snapshot_bytes.
    """
    budget = asked
    if budget is None:
        free = free_host_bytes()
        budget = 1 << 30 if free is None else free // 4
    if budget < snapshot_bytes:
        raise ConfigError(
            "LLM",
            "host_cache_size",
            expected=f"at least {snapshot_bytes} bytes (one snapshot with the keys and values of one block)",
            got=budget,
            hint="Raise KvCacheConfig.host_cache_size, or turn enable_block_reuse off",
        )
    return budget


def free_host_bytes() -> int | None:
    """Host memory that is free or reclaimable now; None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None
