"""Samples of a step as they lie in a run directory: JSON lines, zstd-compressed."""

from __future__ import annotations

import json

from slimecli.errors import DataError
from slimecli.types import Group, Sample


def encode_samples(groups: list[Group]) -> bytes:
    """Groups -> zstd-compressed JSON lines; the same samples give the same bytes."""
    import zstandard

    lines = [s.to_json() for g in groups for s in g]
    return zstandard.ZstdCompressor(level=3).compress(("\n".join(lines) + "\n").encode() if lines else b"")


def decode_samples(data: bytes, source: str) -> list[Group]:
    """Inverse of encode_samples; neighbours with equal group_index form a group."""
    import zstandard

    again = "remove it and run `slime rollout` again"
    try:
        reader = zstandard.ZstdDecompressor().decompressobj()
        text = reader.decompress(data).decode()
    except (zstandard.ZstdError, UnicodeDecodeError) as error:
        raise DataError(f"{source} is damaged: {error}", again) from None
    if not reader.eof or reader.unused_data:
        where = "there is more after its end" if reader.eof else "its end is missing"
        raise DataError(f"{source} is damaged: {where}", again)
    groups: list[Group] = []
    # U+2028 and the like, which JSON leaves as they are, end no line
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            sample = Sample.from_dict(json.loads(line))
        except json.JSONDecodeError as error:
            raise DataError(f"{source}:{number}:{error.colno}: {error.msg}", again) from None
        if groups and groups[-1][0].group_index == sample.group_index and sample.group_index is not None:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups
