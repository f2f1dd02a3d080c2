"""How samples lie in one forward pass: every distinct prefix once, positions counted from its own sample's start.

The hidden state of a token depends on the tokens up to it and nothing else. Sorted samples share their longest common
prefix with a neighbour, so the tokens of a micro-batch form a trie; its nodes are what the model computes. The prompt
of a group is computed once, and so is whatever its answers begin with in common. Attention reads nodes through an index
that lists them sample by sample; gradients add up through the same index, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from slimecli.batch import TrainBatch


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Index tensors of one micro-batch. U nodes, F positions of all samples, R trained positions.

    Example, samples [5, 6, 7] and [5, 6, 8, 9] (the last token of a sample predicts nothing and is left out):
        token_ids=[5, 6, 8], position_ids=[0, 1, 2], nodes=[0, 1, 0, 1, 2], starts=[0, 2, 5], owners=[0, 1, 4]
    """

    token_ids: Tensor
    """[U] int64"""
    position_ids: Tensor
    """[U] int64"""
    nodes: Tensor
    """[F] int64, the node at each position of each sample"""
    starts: Tensor
    """[N+1] int32, where each sample begins in F"""
    owners: Tensor
    """[U] int64, a position in F of each node"""
    longest: int
    """positions of the longest sample"""
    rows: Tensor
    """[R] int64, the node that predicts each trained token"""
    targets: Tensor
    """[R] int64, the trained tokens"""
    places: Tensor
    """[R] int64, where these stand in the batch's T"""

    @cached_property
    def padded(self) -> tuple[Tensor, Tensor]:
        """[N * longest] the node at each place of a padded table, and [U] a place of each node in it."""
        starts = self.starts.long()
        lengths = starts.diff()
        shift = torch.arange(len(lengths), device=starts.device) * self.longest - starts[:-1]
        places = torch.arange(len(self.nodes), device=starts.device) + torch.repeat_interleave(shift, lengths)
        index = self.nodes.new_zeros(len(lengths) * self.longest)
        index[places] = self.nodes
        return index, places[self.owners]

    def to(self, device: torch.device) -> Packing:
        """On a device."""
        moved = {k: v.to(device, non_blocking=True) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return Packing(**moved, longest=self.longest)


def pack(batch: TrainBatch, *, share: bool = True) -> Packing:
    """The packing of a batch.

    Args:
        share: compute common prefixes once; False computes every sample on its own.
    """
    tokens, cu_seqlens = batch.tokens.tolist(), batch.cu_seqlens.tolist()
    spans = list(pairwise(cu_seqlens))
    samples = [tokens[a : max(b - 1, a + 1)] for a, b in spans]
    order = sorted(range(len(samples)), key=samples.__getitem__) if share else list(range(len(samples)))
    token_ids: list[int] = []
    position_ids: list[int] = []
    nodes: list[int] = []
    owners: list[int] = []
    starts = [0]
    node_at = [0] * len(tokens)
    previous: list[int] = []
    path: list[int] = []
    for index in order:
        sample, begin = samples[index], spans[index][0]
        common = _common(previous, sample) if share else 0
        fresh = len(sample) - common
        path = path[:common] + list(range(len(token_ids), len(token_ids) + fresh))
        owners.extend(range(len(nodes) + common, len(nodes) + len(sample)))
        token_ids.extend(sample[common:])
        position_ids.extend(range(common, len(sample)))
        nodes.extend(path)
        starts.append(len(nodes))
        node_at[begin : begin + len(sample)] = path
        previous = sample
    places = batch.loss_mask.nonzero().squeeze(1)
    return Packing(
        token_ids=torch.tensor(token_ids),
        position_ids=torch.tensor(position_ids),
        nodes=torch.tensor(nodes),
        starts=torch.tensor(starts, dtype=torch.int32),
        owners=torch.tensor(owners),
        longest=max(map(len, samples)),
        rows=torch.tensor(node_at)[places],
        targets=batch.targets[places],
        places=places,
    )


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    return next(i for i in range(limit) if a[i] != b[i])
