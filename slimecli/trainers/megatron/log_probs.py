"""Log-probs and entropy over a vocabulary that is split over tensor-parallel ranks, without ever holding all logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def vocab_parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk: int,
    vocab: int,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """[R] float32 log-probability of each target and [R] float32 entropy (nats) of each row's distribution.

    Args:
        hidden: [R, H] last hidden states, the same on every rank of the group. Their gradient is this rank's part of
            a sum over the group: let it pass through an operation whose backward adds up.
        weight: [V / ranks, H] this rank's rows of the output embedding.
        targets: [R] int64.
        temperature: logits are divided by it.
        chunk: rows of logits alive at a time; the backward pass computes them again.
        vocab: rows of the whole embedding that stand for tokens; those after them are padding and get no probability.
        group: tensor-parallel ranks.
    """
    first = dist.get_rank(group) * len(weight)
    real = min(max(vocab - first, 0), len(weight))
    result: tuple[Tensor, Tensor] = _VocabParallelLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, _Shard(first, real, 1.0 / temperature, chunk, group)
    )
    return result


class _Shard:
    """What a rank has of the vocabulary, and how it computes."""

    def __init__(self, first: int, real: int, scale: float, chunk: int, group: dist.ProcessGroup) -> None:
        self.first = first
        """token id of the shard's first row"""
        self.real = real
        """rows that are not padding"""
        self.scale = scale
        self.chunk = chunk
        self.group = group

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """[rows, V / ranks] float32; -inf for padding."""
        z = (hidden @ weight.T).float().mul_(self.scale)
        z[:, self.real :] = -torch.inf
        return z

    def place(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(local row of each target, 1.0 where the target is in this shard)."""
        inside = (targets >= self.first) & (targets < self.first + self.real)
        return (targets - self.first).clamp(0, max(self.real - 1, 0))[:, None], inside.float()[:, None]

    def reduce(self, values: Tensor, operation: Any) -> Tensor:
        """`values`, reduced over the group in place."""
        if dist.get_world_size(self.group) > 1:
            dist.all_reduce(values, op=operation, group=self.group)
        return values


class _VocabParallelLogProbs(torch.autograd.Function):
    """With z the logits of all ranks, p = softmax(z), lp = z_y - logsumexp(z), H = logsumexp(z) - sum p z:

    d lp / d z = onehot(y) - p        d H / d z = -p (log p + H)
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, shard: _Shard) -> tuple[Tensor, Tensor]:
        log_probs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy, normalizer = torch.empty_like(log_probs), torch.empty_like(log_probs)
        for start in range(0, len(hidden), shard.chunk):
            rows = slice(start, start + shard.chunk)
            z = shard.logits(hidden[rows], weight)
            highest = shard.reduce(z.amax(1), dist.ReduceOp.MAX)
            e = (z - highest[:, None]).exp_()
            column, inside = shard.place(targets[rows])
            z[:, shard.real :] = 0.0
            of_target = z.gather(1, column) * inside
            sums = torch.stack([e.sum(1), e.mul_(z).sum(1), of_target.squeeze(1)])
            total, weighted, target = shard.reduce(sums, dist.ReduceOp.SUM)
            normalizer[rows] = total.log() + highest
            log_probs[rows] = target - normalizer[rows]
            entropy[rows] = normalizer[rows] - weighted / total
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        by_log_prob, by_entropy = grads
        shard: _Shard = ctx.shard
        d_hidden = torch.zeros_like(hidden)
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, len(hidden), shard.chunk):
            rows = slice(start, start + shard.chunk)
            log_p = shard.logits(hidden[rows], weight).sub_(normalizer[rows, None])
            p = log_p.exp()
            d_logits = torch.zeros_like(p)
            if by_entropy is not None:
                log_p[:, shard.real :] = 0.0
                d_logits = log_p.add_(entropy[rows, None]).mul_(-by_entropy[rows, None]).mul_(p)
            if by_log_prob is not None:
                by_row = by_log_prob[rows, None]
                column, inside = shard.place(targets[rows])
                d_logits.sub_(p.mul_(by_row)).scatter_add_(1, column, by_row * inside)
            d_logits = d_logits.mul_(shard.scale).to(weight.dtype)
            torch.mm(d_logits, weight, out=d_hidden[rows])
            if d_weight is not None:
                d_weight += d_logits.T @ hidden[rows]
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None
