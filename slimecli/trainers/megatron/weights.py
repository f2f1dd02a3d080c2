"""Live parameters <-> HF tensors, through megatron-core's own description of its shards and slime's weight maps.

`sharded_state_dict` says of every local tensor which region of which named tensor it is; a rule says which HF tensors a
region is made of. So any tensor, pipeline, expert and data layout is served by the same two loops, and no rank ever
holds more than one bucket of whole tensors.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimecli.errors import DataError, SlimeError
from slimecli.model_specs import ModelSpec
from slimecli.trainers.megatron.critic import HEAD
from slimecli.trainers.megatron.prediction import PREFIX
from slimecli.weights.hf import HfFolder
from slimecli.weights.maps import rules_of
from slimecli.weights.maps.layouts import LAYOUTS
from slimecli.weights.maps.rule import Rule

BUCKET_BYTES = 256 << 20
"""whole tensors gathered in one collective, at least one"""
ALIGNMENT = 256
"""bytes; where each tensor of a bucket begins, as CUDA's allocator has it"""

Shape = tuple[int, ...]


def load_hf(chunks: list[Any], folder: HfFolder, spec: ModelSpec) -> None:
    """Fill this rank's parameters from an HF folder; each reads what it needs."""
    stored = {name: entry.shape for name, entry in folder.entries.items()}
    shards = local_shards(chunks)
    rules = _by_key(rules_of(spec, _embedding_rows(shards), stored))
    with torch.no_grad():
        for shard in shards:
            if shard.key == HEAD:  # a critic's, which no folder has: it stays as it was made
                continue
            if shard.key.startswith(PREFIX) and shard.key not in rules:  # a teacher without them takes this place
                continue
            covered = 0
            for rule in rules.get(shard.key, []):
                covered += _copy_overlap(shard, rule, folder)
            if covered != shard.data.numel():
                raise DataError(
                    f"{folder.path}: only {covered} of {shard.data.numel()} numbers of {shard.key} are there",
                    "report this: the weight map does not cover the model",
                )


def hf_tensors(
    chunks: list[Any], spec: ModelSpec, dtype: torch.dtype, folder: HfFolder
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole tensor in `dtype`) in the map's order, on every rank, named as in the folder the model is from.

    Collective: all ranks must iterate.

    Args:
        spec: of what the chunks have; without prediction layers if they have none.
    """
    shards = local_shards(chunks)
    device = shards[0].data.device  # also where this rank gives nothing: collectives are on the device of the model
    owned: dict[str, list[Any]] = defaultdict(list)
    for shard in shards:
        if all(i == 0 for i in _replica(shard)):
            owned[shard.key].append(shard)
    stored = {name: entry.shape for name, entry in folder.entries.items()}
    known = rules_of(spec, _agreed_rows(shards), stored)
    # what goes through under its own name is outside the language model
    rules = [rule for rule in known if tuple(rule.hf) != (rule.key,)]
    bucket: list[Rule] = []
    size = 0
    for rule in rules:
        nbytes = math.prod(rule.chunk) * dtype.itemsize
        if bucket and size + nbytes > BUCKET_BYTES:
            yield from _gather(bucket, owned, dtype, device)
            bucket, size = [], 0
        bucket.append(rule)
        size += nbytes
    yield from _gather(bucket, owned, dtype, device)


def carried(folder: HfFolder, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """(HF name, tensor) of what the folder has outside the language model (a vision tower), which stays as it is."""
    prefixes = LAYOUTS[spec.family.layout].carried
    for name in folder.names:
        if prefixes and name.startswith(prefixes):
            yield name, folder.read(name)


def local_shards(chunks: list[Any]) -> list[Any]:
    """megatron-core's ShardedTensor for every piece of a parameter or buffer here; `.data` is the live memory."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    out: list[Any] = []
    with torch.no_grad():
        for chunk in chunks:
            tree = chunk.sharded_state_dict(metadata=checkpoint_metadata())
            apply_factories(tree)
            out += [leaf for leaf in _leaves(tree) if isinstance(leaf, ShardedTensor)]
    return out


def checkpoint_metadata() -> dict[str, Any]:
    """What tells megatron-core to name layers one by one, as slime's checkpoints do."""
    from megatron.core import parallel_state

    return {
        "non_homogeneous_layers": True,
        "singleton_local_shards": False,
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _leaves(value)
    else:
        yield tree


def _by_key(rules: list[Rule]) -> dict[str, list[Rule]]:
    out: dict[str, list[Rule]] = defaultdict(list)
    for rule in rules:
        out[rule.key].append(rule)
    return out


def _embedding_rows(shards: list[Any]) -> int:
    """Rows of Megatron's (padded) embedding, as far as this rank knows; 0: it has no part of it."""
    keys = ("embedding.word_embeddings.weight", "output_layer.weight")
    return next((shard.global_shape[0] for shard in shards if shard.key in keys), 0)


def _agreed_rows(shards: list[Any]) -> int:
    rows = torch.tensor([_embedding_rows(shards)], device=shards[0].data.device)
    dist.all_reduce(rows, op=dist.ReduceOp.MAX)
    return int(rows)


def _replica(shard: Any) -> tuple[int, ...]:
    return shard.replica_id if isinstance(shard.replica_id, tuple) else (shard.replica_id,)


def _region(shard: Any) -> tuple[Shape, Shape]:
    """(offset, shape) of a shard in the whole tensor; leading dimensions of size one are the prepended axes."""
    lead = len(shard.global_shape) - len(shard.local_shape)
    return tuple(shard.global_offset), (1,) * lead + tuple(shard.local_shape)


def _overlap(shard: Any, rule: Rule) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """(where in the shard, where in the rule's chunk) they share numbers."""
    begin, size = _region(shard)
    in_shard, in_rule = [], []
    for a, n, b, m in zip(begin, size, rule.offset, rule.chunk, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        in_shard.append(slice(low - a, high - a))
        in_rule.append(slice(low - b, high - b))
    return tuple(in_shard), tuple(in_rule)


def _copy_overlap(shard: Any, rule: Rule, folder: HfFolder) -> int:
    """Fill what a rule knows of a shard; returns how many numbers."""
    found = _overlap(shard, rule)
    if found is None:
        return 0
    in_shard, in_rule = found
    chunk = rule.merge([folder.read(name) for name in rule.hf]).reshape(rule.chunk)[in_rule]
    shard.data.detach().view(_region(shard)[1])[in_shard].copy_(chunk)
    return chunk.numel()


def _check_given(bucket: list[Rule], given: Tensor) -> None:
    """Every number of every tensor came from exactly one rank."""
    if dist.get_world_size() > 1:
        dist.all_reduce(given)
    for rule, count in zip(bucket, given.tolist(), strict=True):
        if count != math.prod(rule.chunk):
            raise SlimeError(
                f"{rule.key}: the ranks together gave {count} of {math.prod(rule.chunk)} numbers",
                "report this: a layer does not say rightly which rank holds what",
            )


def _gather(
    bucket: list[Rule], owned: dict[str, list[Any]], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """The whole tensors of some rules. Bits are added up as integers, with zero where a rank has nothing: exact."""
    kinds = [torch.float32 if rule.keep_dtype else dtype for rule in bucket]
    sizes = [math.prod(rule.chunk) * kind.itemsize for rule, kind in zip(bucket, kinds, strict=True)]
    # one buffer for all, of which the tensors are views: a bucket is in memory once, and summed where it is
    begins = [0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
    bits = torch.zeros(begins[-1], dtype=torch.uint8, device=device)
    given = torch.zeros(len(bucket), dtype=torch.int64)
    flats = []
    for number, (rule, kept) in enumerate(zip(bucket, kinds, strict=True)):
        whole = bits[begins[number] :][: sizes[number]].view(kept).reshape(rule.chunk)
        for shard in owned.get(rule.key, []):
            found = _overlap(shard, rule)
            if found is not None:
                in_shard, in_rule = found
                piece = shard.data.detach().view(_region(shard)[1])[in_shard]
                whole[in_rule] = piece.to(kept)
                given[number] += piece.numel()
        flats.append(whole)
    _check_given(bucket, given.to(device))
    if dist.get_world_size() > 1:
        dist.all_reduce(bits.view(torch.int32))
    for rule, whole in zip(bucket, flats, strict=True):
        yield from zip(rule.hf, rule.split(whole), strict=True)
