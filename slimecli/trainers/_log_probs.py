"""Log-probs and entropy of packed rows without ever holding all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def token_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """[R] float32 log-probability of each target and [R] float32 entropy (nats) of each row's distribution.

    Args:
        hidden: [R, H] last hidden states.
        weight: [V, H] output embedding.
        targets: [R] int64.
        temperature: logits are divided by it.
        chunk: rows of logits alive at a time; the backward pass computes them again.
    """
    result: tuple[Tensor, Tensor] = _TokenLogProbs.apply(hidden, weight, targets, 1.0 / temperature, chunk)  # type: ignore[no-untyped-call]
    return result


class _TokenLogProbs(torch.autograd.Function):
    """With p = softmax(z), lp = z_y - logsumexp(z), H = logsumexp(z) - sum p z:

    d lp / d z = onehot(y) - p        d H / d z = -p (log p + H)
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        log_probs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy, normalizer = torch.empty_like(log_probs), torch.empty_like(log_probs)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            z = _logits(hidden[rows], weight, scale)
            total = z.logsumexp(1)
            normalizer[rows] = total
            log_probs[rows] = z.gather(1, targets[rows, None]).squeeze(1) - total
            p = (z - total[:, None]).exp_()
            entropy[rows] = total - p.mul_(z).sum(1)
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.scale, ctx.chunk = scale, chunk
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        by_log_prob, by_entropy = grads
        d_hidden = torch.zeros_like(hidden)
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, len(hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            log_p = _logits(hidden[rows], weight, ctx.scale).sub_(normalizer[rows, None])
            d_logits = torch.zeros_like(log_p)
            if by_entropy is not None:
                d_logits = (log_p + entropy[rows, None]).mul_(-by_entropy[rows, None])
            p = log_p.exp_()
            if by_entropy is not None:
                d_logits.mul_(p)
            if by_log_prob is not None:
                by_row = by_log_prob[rows, None]
                d_logits.sub_(p.mul_(by_row)).scatter_add_(1, targets[rows, None], by_row)
            d_logits = d_logits.mul_(ctx.scale).to(weight.dtype)
            torch.mm(d_logits, weight, out=d_hidden[rows])
            d_weight += d_logits.T @ hidden[rows]
        return d_hidden, d_weight.to(weight.dtype), None, None, None


def _logits(hidden: Tensor, weight: Tensor, scale: float) -> Tensor:
    """[rows, V] float32."""
    return (hidden @ weight.T).float().mul_(scale)
