"""A micro-batch as megatron-core takes it: packed (thd), padded as the layout needs, split over context ranks.

Context parallelism gives rank r of c the chunks r and 2c-1-r of every sample cut into 2c (Megatron's zig-zag), so that
causal attention costs every rank the same. Each sample is padded at its end to a multiple of 2c; what follows a token
never changes it, so padding is harmless there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimecli.batch import TrainBatch


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Index tensors of one micro-batch on one rank: L local positions, P of them predict trained tokens.

    Example, samples [5, 6, 7] and [8, 9], no parallelism: token_ids=[[5, 6, 7, 8, 9]], cu_seqlens=[0, 3, 5];
    with context parallelism 2, rank 0 of [5, 6, 7, pad] has the chunks 0 and 3: [5, pad].
    """

    batch: TrainBatch
    """the samples, whole"""
    token_ids: Tensor
    """[1, L] int64"""
    position_ids: Tensor
    """[1, L] int64"""
    cu_seqlens: Tensor
    """[N'+1] int32, where each padded sample begins over all context-parallel ranks together"""
    longest: int
    """tokens of the longest padded sample"""
    sources: Tensor
    """[L] int64 on the CPU, where each local position stands in the batch's T; T for padding"""
    rows: Tensor
    """[P] int64, local positions that predict a trained token"""
    targets: Tensor
    """[P] int64, the token predicted"""
    places: Tensor
    """[P] int64, where the prediction stands in the batch's T"""

    def packed(self) -> Any:
        """megatron-core's PackedSeqParams."""
        from megatron.core.packed_seq_params import PackedSeqParams

        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=self.longest,
            max_seqlen_kv=self.longest,
        )

    def ids_ahead(self, count: int) -> Tensor:
        """[1, L] int64, the token `count` places after each local position; 0 where its sample has ended."""
        sources = self._ahead(count)
        return torch.nn.functional.pad(self.batch.tokens, (0, 1))[sources][None].to(self.token_ids.device)

    def predicted_ahead(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """([P'], [P'], [P']) int64: local positions from which a trained token of the same sample is predicted `count`
        tokens further ahead than usual, that token, and where its usual prediction stands in the batch's T."""
        sources, device = self._ahead(count), self.token_ids.device
        rows = torch.nn.functional.pad(self.batch.loss_mask, (0, 1))[sources].nonzero().squeeze(1)
        places = sources[rows]
        return rows.to(device), self.batch.targets[places].to(device), places.to(device)

    def _ahead(self, count: int) -> Tensor:
        """[L] int64, where the position `count` after each local one stands in the batch's T; T beyond its sample."""
        begins, nowhere = self.batch.cu_seqlens, self.batch.num_tokens
        ends = begins[torch.searchsorted(begins, self.sources, right=True).clamp(max=len(begins) - 1)]
        return torch.where(self.sources + count < ends, self.sources + count, nowhere)


def local_length(batch: TrainBatch, *, context_ranks: int, multiple: int) -> int:
    """Positions that a rank has of some samples: those of the padded samples, up to a multiple.

    Args:
        multiple: the tensor-parallel size with sequence parallelism, which divides positions over ranks; 1 without.
    """
    parts = _parts(context_ranks)
    whole: int = sum(-(-n // parts) * parts for n in batch.lengths.tolist())
    unit = math.lcm(parts, multiple * context_ranks)
    return -(-whole // unit) * unit // context_ranks


def make_micro_batch(
    batch: TrainBatch, *, context_ranks: int, context_rank: int, length: int, device: torch.device
) -> MicroBatch:
    """One rank's view of some samples.

    Args:
        length: local positions, `local_length` of these samples or of more; the padding is a sample of its own.
    """
    parts = _parts(context_ranks)
    lengths = batch.lengths.tolist()
    begins = batch.cu_seqlens.tolist()
    padded = [-(-n // parts) * parts for n in lengths]
    tail = length * context_ranks - sum(padded)
    if tail:
        padded.append(tail)
    # position in the batch's T of every local position; T itself stands for padding
    nowhere = batch.num_tokens
    sources: list[Tensor] = []
    positions: list[Tensor] = []
    for index, size in enumerate(padded):
        within = torch.arange(size)
        if context_ranks > 1:
            chunks = within.chunk(parts)
            within = torch.cat([chunks[context_rank], chunks[parts - 1 - context_rank]])
        length = lengths[index] if index < len(lengths) else 0
        begin = begins[index] if index < len(lengths) else 0
        sources.append(torch.where(within < length, within + begin, nowhere))
        positions.append(within)
    source, position = torch.cat(sources), torch.cat(positions)
    extended_mask = torch.nn.functional.pad(batch.loss_mask, (0, 1))
    rows = extended_mask[source].nonzero().squeeze(1)
    places = source[rows]
    bounds = torch.nn.functional.pad(torch.tensor(padded, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
    return MicroBatch(
        batch=batch,
        token_ids=torch.nn.functional.pad(batch.tokens, (0, 1))[source][None].to(device),
        position_ids=position[None].to(device),
        cu_seqlens=bounds.to(device),
        longest=max(padded),
        sources=source,
        rows=rows.to(device),
        targets=batch.targets[places].to(device),
        places=places.to(device),
    )


def _parts(context_ranks: int) -> int:
    """Chunks that a sample is cut into."""
    return 2 * context_ranks if context_ranks > 1 else 1


def to_batch(values: Tensor, micro_batch: MicroBatch, group: dist.ProcessGroup, places: Tensor | None = None) -> Tensor:
    """[T] values of whole samples from each context-parallel rank's [P]; 0 where nothing is trained.

    Args:
        places: [P] where they stand in the batch's T; None: at the micro-batch's own predictions.

    Every rank gets all values and computes the same loss from them; in the backward pass each keeps the gradient of its
    own positions, so that gradients are right when they are added up over context-parallel ranks.
    """
    empty = torch.zeros(micro_batch.batch.num_tokens, dtype=values.dtype, device=values.device)
    own = empty.index_put((micro_batch.places if places is None else places,), values)
    if dist.get_world_size(group) == 1:
        return own
    whole: Tensor = _AddedUp.apply(own, group)  # type: ignore[no-untyped-call]
    return whole


class _AddedUp(torch.autograd.Function):
    """Sum over ranks that each hold other positions; the gradient of a rank's own values passes unchanged."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
