"""How samples lie in one forward pass: every distinct prefix once, positions counted from its own sample's start.

The hidden state of a token depends on the tokens up to it and nothing else. Sorted samples share their longest common
prefix with a neighbour, so the tokens of a micro-batch form a trie; its nodes are what the model computes. The prompt
of a group is computed once, and so is whatever its answers begin with in common. Attention reads nodes through an index
that lists them sample by sample; gradients add up through the same index, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise

import torch
from torch import Tensor

from slimecli.batch import TrainBatch, flat_tensor


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Index tensors of one micro-batch: U nodes, F positions of all samples, P distinct predictions, R trained tokens.

    Example, samples [5, 6, 7] and [5, 6, 8, 9] (the last token of a sample predicts nothing and is left out):
        token_ids=[5, 6, 8], position_ids=[0, 1, 2], nodes=[0, 1, 0, 1, 2], starts=[0, 2, 5], fresh=[2, 1],
        rows=[0, 1, 1, 2], targets=[6, 7, 8, 9], places=[0, 1, 3, 4, 5], predictions=[0, 1, 0, 2, 3]
    """

    token_ids: Tensor
    """[U] int64"""
    position_ids: Tensor
    """[U] int64"""
    nodes: Tensor
    """[F] int64, the node at each position of each sample"""
    starts: Tensor
    """[N+1] int64, where each sample begins in F"""
    fresh: Tensor
    """[N] int64, how many positions at its end are nodes that no sample before it has"""
    rows: Tensor
    """[P] int64, the node of each prediction"""
    targets: Tensor
    """[P] int64, the token predicted"""
    places: Tensor
    """[R] int64, where the trained tokens stand in the batch's T"""
    predictions: Tensor
    """[R] int64, the prediction of each of them"""

    def to(self, device: torch.device) -> Packing:
        """On a device."""
        return Packing(**{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})


def pack(batch: TrainBatch, *, share: bool = True) -> Packing:
    """The packing of a batch.

    Args:
        share: compute common prefixes once; False computes every sample on its own.
    """
    tokens, cu_seqlens = batch.tokens.tolist(), batch.cu_seqlens.tolist()
    begins = cu_seqlens[:-1]
    samples = [tokens[a : max(b - 1, a + 1)] for a, b in pairwise(cu_seqlens)]
    order = sorted(range(len(samples)), key=samples.__getitem__) if share else list(range(len(samples)))
    token_ids: list[int] = []
    position_ids: list[int] = []
    nodes: list[int] = []
    fresh: list[int] = []
    node_at = [0] * len(tokens)
    previous: list[int] = []
    path: list[int] = []
    for index in order:
        sample, begin = samples[index], begins[index]
        common = _common(previous, sample) if share else 0
        count = len(sample) - common
        path = path[:common] + list(range(len(token_ids), len(token_ids) + count))
        token_ids += sample[common:]
        position_ids += range(common, len(sample))
        nodes += path
        fresh.append(count)
        node_at[begin : begin + len(sample)] = path
        previous = sample
    places = batch.loss_mask.nonzero().squeeze(1)
    predicting, targets = flat_tensor(node_at, torch.int64)[places], batch.targets[places]
    vocabulary = int(targets.max()) + 1 if len(targets) else 1
    distinct, predictions = torch.unique(predicting * vocabulary + targets, return_inverse=True)
    lengths = torch.tensor([len(samples[i]) for i in order])
    return Packing(
        token_ids=flat_tensor(token_ids, torch.int64),
        position_ids=flat_tensor(position_ids, torch.int64),
        nodes=flat_tensor(nodes, torch.int64),
        starts=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        fresh=torch.tensor(fresh),
        rows=distinct // vocabulary,
        targets=distinct % vocabulary,
        places=places,
        predictions=predictions,
    )


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    return next(i for i in range(limit) if a[i] != b[i])
