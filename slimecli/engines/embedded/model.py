"""Dense decoder (Qwen2, Qwen2.5, Qwen3, Llama, Mistral without window) over a slot cache, with fused projections."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from slimecli.engines.embedded.config import DecoderConfig, inverse_frequencies
from slimecli.engines.embedded.kv import ROWS, WINDOW, KVCache, round_up


@dataclass(kw_only=True)
class Layer:
    """Weights of one layer. R = rows of a fused matrix."""

    norm1: torch.Tensor
    qkv: torch.Tensor
    """[(heads + 2 kv_heads) * head_dim, hidden]"""
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    """[2, head_dim]: of the queries, of the keys"""
    o: torch.Tensor
    o_bias: torch.Tensor | None
    norm2: torch.Tensor
    gate_up: torch.Tensor
    """[2 * ffn, hidden]"""
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    qk_scale: torch.Tensor | None = field(default=None)
    """[heads + kv_heads, head_dim] qk_norm laid out per head; derived"""


NATIVE = 400
"""matrix products [a, b] x [b, c] with a * b * c below this have a kernel, and a rounding, of their own on a CPU"""


class Decoder:
    """Forward passes over slots.

    Attributes:
        window_step: attended lengths are multiples of this; the result does not depend on which.
        live: HF name -> view into the fused tensors, in the checkpoint's order. Writing to a view loads a weight.
        cache: the KV cache, or None while it sleeps.
    """

    def __init__(
        self, config: DecoderConfig, *, slots: int, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.vocab = config.vocab
        self.dtype = dtype
        self.device = device
        self.live: dict[str, torch.Tensor] = {}
        self.aliases = {"lm_head.weight": "model.embed_tokens.weight"} if config.tied else {}
        self._owned: list[torch.Tensor] = []
        self._build()
        length = round_up(max_len, WINDOW)
        rows = padded_rows(slots)
        self.cache = KVCache((config.layers, rows, config.kv_heads, length, config.head_dim), dtype, device)
        self._by_products = device.type == "cpu" and dtype == torch.float32
        small = config.heads // config.kv_heads * config.head_dim < NATIVE // ROWS
        self.window_step = ROWS if self._by_products and not small else WINDOW
        angles = torch.outer(
            torch.arange(length, dtype=torch.float32), inverse_frequencies(config.rope, config.head_dim)
        )
        # the second half of the sine table carries the sign of the rotation, so that rotating is one swap of halves
        self._cos = torch.cat([angles.cos(), angles.cos()], -1).to(dtype).to(device)
        self._sin = torch.cat([-angles.sin(), angles.sin()], -1).to(dtype).to(device)
        self._positions = torch.arange(length, device=device)
        self._rows = torch.arange(rows, device=device)

    # -- weights -----------------------------------------------------------------------------------------------------

    def _new(self, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._owned.append(tensor)
        return tensor

    def _build(self) -> None:
        c = self.config
        self._embed = self._new(c.vocab, c.hidden)
        self.live["model.embed_tokens.weight"] = self._embed
        self._layers = [self._build_layer(i) for i in range(c.layers)]
        self._norm = self._new(c.hidden)
        self.live["model.norm.weight"] = self._norm
        self._head = self._embed
        if not c.tied:
            self._head = self._new(c.vocab, c.hidden)
            self.live["lm_head.weight"] = self._head

    def _build_layer(self, index: int) -> Layer:
        c = self.config
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        layer = Layer(
            norm1=self._new(c.hidden),
            qkv=self._new(q + 2 * kv, c.hidden),
            qkv_bias=self._new(q + 2 * kv) if c.qkv_bias else None,
            qk_norm=self._new(2, c.head_dim) if c.qk_norm else None,
            o=self._new(c.hidden, q),
            o_bias=self._new(c.hidden) if c.o_bias else None,
            norm2=self._new(c.hidden),
            gate_up=self._new(2 * c.ffn, c.hidden),
            gate_up_bias=self._new(2 * c.ffn) if c.mlp_bias else None,
            down=self._new(c.hidden, c.ffn),
            down_bias=self._new(c.hidden) if c.mlp_bias else None,
        )
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        self._name(f"model.layers.{index}", ["input_layernorm.weight"], layer.norm1, [c.hidden])
        for kind, matrix, bias in (("weight", layer.qkv, 0), ("bias", layer.qkv_bias, 1)):
            self._name(attention, [f"{p}_proj.{kind}" for p in "qkv"], matrix, [q, kv, kv])
            self._name(attention, [f"o_proj.{kind}"], layer.o_bias if bias else layer.o, [c.hidden])
            self._name(
                mlp, [f"{p}_proj.{kind}" for p in ("gate", "up")], layer.gate_up_bias if bias else layer.gate_up,
                [c.ffn, c.ffn],
            )  # fmt: skip
            self._name(mlp, [f"down_proj.{kind}"], layer.down_bias if bias else layer.down, [c.hidden])
        if layer.qk_norm is not None:
            self.live[f"{attention}.q_norm.weight"], self.live[f"{attention}.k_norm.weight"] = layer.qk_norm
        self._name(f"model.layers.{index}", ["post_attention_layernorm.weight"], layer.norm2, [c.hidden])
        return layer

    def _name(self, prefix: str, names: list[str], fused: torch.Tensor | None, rows: list[int]) -> None:
        if fused is not None:
            for name, part in zip(names, torch.split(fused, rows), strict=True):
                self.live[f"{prefix}.{name}"] = part

    def weights_changed(self) -> None:
        """Derive what is derived; call after writing to `live`."""
        c = self.config
        for layer in self._layers:
            if layer.qk_norm is not None:
                query, key = layer.qk_norm
                layer.qk_scale = torch.cat([query.expand(c.heads, -1), key.expand(c.kv_heads, -1)])

    def free_weights(self) -> None:
        """Give the memory of the weights back; names and shapes stay."""
        for tensor in self._owned:
            tensor.untyped_storage().resize_(0)

    def allocate_weights(self) -> None:
        """Take the memory again; its content is undefined until every weight is loaded."""
        for tensor in self._owned:
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())

    @property
    def weight_bytes(self) -> int:
        """Memory held by weights now."""
        return sum(t.untyped_storage().nbytes() for t in self._owned)

    # -- forward -----------------------------------------------------------------------------------------------------

    def _project(self, h: torch.Tensor, layer: Layer, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[M, hidden] -> [M, heads + 2 kv_heads, D]: queries and keys, rotated, then values."""
        c = self.config
        fused = F.linear(F.rms_norm(h, (c.hidden,), layer.norm1, c.eps), layer.qkv, layer.qkv_bias)
        heads = fused.view(-1, c.heads + 2 * c.kv_heads, c.head_dim)
        qk = heads[:, : c.heads + c.kv_heads]
        plain = qk if layer.qk_scale is None else F.rms_norm(qk, (c.head_dim,), None, c.eps).mul_(layer.qk_scale)
        first, second = plain.chunk(2, -1)
        swapped = torch.cat((second, first), -1)
        torch.mul(plain, cos, out=qk).addcmul_(swapped, sin)
        return heads

    def _add_mlp(self, h: torch.Tensor, layer: Layer) -> torch.Tensor:
        c = self.config
        gate, up = F.linear(
            F.rms_norm(h, (c.hidden,), layer.norm2, c.eps), layer.gate_up, layer.gate_up_bias
        ).chunk(2, -1)  # fmt: skip
        return _add_linear(h, F.silu(gate).mul_(up), layer.down, layer.down_bias)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, hidden] -> [M, vocab] float32; M must be a multiple of ROWS."""
        c = self.config
        return F.linear(F.rms_norm(hidden, (c.hidden,), self._norm, c.eps), self._head).float()

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, count: int, window: int) -> torch.Tensor:
        """One token for each of the first `count` slots.

        Args:
            tokens, positions: [M], M a multiple of ROWS; rows of empty slots are computed and meaningless.
            window: attended positions, a multiple of window_step above the largest position.

        Returns:
            [M, vocab] float32 logits.
        """
        c = self.config
        rows, cos, sin = self._rows[: len(tokens)], self._cos[positions][:, None], self._sin[positions][:, None]
        hidden = self._positions[:window] > positions[:, None]
        mask = torch.zeros_like(hidden, dtype=self.dtype).masked_fill_(hidden, float("-inf"))
        mask = mask.repeat_interleave(c.kv_heads, 0)[:, None]
        h = F.embedding(tokens, self._embed)
        for layer, kv in zip(self._layers, self.cache.kv, strict=True):
            heads = self._project(h, layer, cos, sin)
            kv[:, rows, :, positions] = heads[:, c.heads :].view(len(tokens), 2, c.kv_heads, c.head_dim)
            h = _add_linear(h, self._attend(heads[:, : c.heads], kv, window, mask), layer.o, layer.o_bias)
            h = self._add_mlp(h, layer)
        return self.logits(h)

    def _attend(self, queries: torch.Tensor, kv: torch.Tensor, window: int, mask: torch.Tensor) -> torch.Tensor:
        """[M, heads, D] queries against the first M slots of a layer's cache -> [M, heads * D].

        The queries that share a key head are viewed as query positions: no copy of keys and values per head.
        """
        c = self.config
        count = len(queries) * c.kv_heads
        q = queries.reshape(count, -1, c.head_dim)
        k, v = kv.view(2, -1, *kv.shape[3:])[:, :count, :window]
        if self._by_products:
            scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=c.head_dim**-0.5)
            out = torch.bmm(scores.softmax(-1), v)
        else:
            out = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=mask[:, None])
        return out.view(len(queries), -1)

    def prefill(self, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Fill the cache from position 0.

        Args:
            ids: [n, P] token ids, padded on the right; P a multiple of ROWS, the same for a given prompt length.
            slots: [n] where the keys and values go.

        Returns:
            [n, P, hidden] for `logits`.
        """
        c = self.config
        n, length = ids.shape
        cos, sin = self._cos[:length].repeat(n, 1)[:, None], self._sin[:length].repeat(n, 1)[:, None]
        h = F.embedding(ids.view(-1), self._embed)
        groups = c.heads // c.kv_heads
        for layer, kv in zip(self._layers, self.cache.kv, strict=True):
            heads = self._project(h, layer, cos, sin)
            stored = heads[:, c.heads :].view(n, length, 2, c.kv_heads, c.head_dim)
            kv[:, slots, :, :length] = stored.permute(2, 0, 3, 1, 4)
            per_head = heads.view(n, length, -1, c.head_dim).transpose(1, 2)
            q, k, v = torch.split(per_head, [c.heads, c.kv_heads, c.kv_heads], 1)
            # padding lies behind every real token, so the causal mask hides it
            out = F.scaled_dot_product_attention(
                q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), is_causal=True
            )
            h = _add_linear(h, out.transpose(1, 2).reshape(n * length, -1), layer.o, layer.o_bias)
            h = self._add_mlp(h, layer)
        return h.view(n, length, -1)


def _add_linear(h: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """h + x @ weight.T + bias."""
    total = torch.addmm(h, x, weight.t())
    return total if bias is None else total.add_(bias)


def padded_rows(count: int) -> int:
    """Rows of a product that serves `count` slots."""
    return round_up(max(count, 1), ROWS)
