"""MiMo's two prediction layers in plain torch, sample by sample: the policy in front of them is transformers' own."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from slimecli.batch import TrainBatch


def of_plain_torch(folder: Path, batch: TrainBatch, factor: float) -> tuple[float, dict[str, torch.Tensor]]:
    """(mean surprise of trained tokens, gradients of factor x weighted loss), one sample at a time."""
    from transformers import Qwen2ForCausalLM

    weights = load_file(folder / "model.safetensors")
    leaves = {n: w.requires_grad_() for n, w in weights.items() if n.startswith("model.mtp_layers.")}
    policy = Qwen2ForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    loss, surprise = torch.zeros(()), 0.0
    for begin, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        tokens = batch.tokens[begin:end]
        with torch.no_grad():
            hidden = policy.model(tokens[None]).last_hidden_state[0]
        for k in (0, 1):
            count = len(tokens) - 1 - k  # positions whose token k + 1 places on is of the sample
            if count < 1:
                break
            embedded = weights["model.embed_tokens.weight"][tokens[k + 1 :]]
            hidden = layer(weights, f"model.mtp_layers.{k}.", hidden[:count], embedded)
            if count < 2:
                break
            targets, places = tokens[k + 2 :], slice(begin + k + 1, end - 1)
            logits = hidden[:-1] @ weights["lm_head.weight"].T
            nll = -logits.log_softmax(-1).gather(1, targets[:, None])[:, 0] / 2
            loss = loss + (nll * batch.loss_weight[places]).sum()
            surprise += float((nll.detach() * batch.loss_mask[places]).sum())
    (factor * loss).backward()
    return surprise / float(batch.loss_mask.sum()), {n: w.grad for n, w in leaves.items()}


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """[heads, n, 16], by position."""
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(8) / 8)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    return x * cos + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin


def layer(weights: dict[str, torch.Tensor], prefix: str, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    """[n, H] of one prediction layer of MiMo."""

    def w(name: str) -> torch.Tensor:
        return weights[prefix + name]

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        flat = x @ w(f"self_attn.{name}_proj.weight").T + w(f"self_attn.{name}_proj.bias")
        return flat.view(len(x), -1, 16).transpose(0, 1)

    both = torch.cat([norm(hidden, w("hidden_layernorm.weight")), norm(embedded, w("token_layernorm.weight"))], -1)
    x = both @ w("input_proj.weight").T
    y = norm(x, w("input_layernorm.weight"))
    q, k, v = rotate(project(y, "q")), rotate(project(y, "k")), project(y, "v")
    k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    scores = (q @ k.transpose(1, 2) / 4).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    x = x + (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1) @ w("self_attn.o_proj.weight").T
    y = norm(x, w("post_attention_layernorm.weight"))
    inner = F.silu(y @ w("mlp.gate_proj.weight").T) * (y @ w("mlp.up_proj.weight").T)
    return norm(x + inner @ w("mlp.down_proj.weight").T, w("final_layernorm.weight"))
