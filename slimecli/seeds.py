"""Every random number derives from (run seed, what it is for), never from process history."""

from __future__ import annotations

import hashlib


def derive_seed(root: int, *parts: int | str) -> int:
    """A 31-bit seed for one purpose, e.g. derive_seed(seed, "rollout", step, prompt_index, sample_index).

    The first 31 bits of SHA-256 over the parts, so that neighbouring purposes share no structure.
    """
    text = "/".join(str(p) for p in (root, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
