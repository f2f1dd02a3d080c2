"""Any causal language model of transformers over the same slots: slower than model.py, and for every architecture that
keeps one key and one value per position. Its matrix products are transformers' own, so an answer may differ in the last
bits with the number of rows it is computed among.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slimecli import files
from slimecli.engines.embedded import config as folder_config
from slimecli.engines.embedded.kv import WINDOW, KVCache, round_up
from slimecli.errors import SlimeError
from slimecli.weights.quant_scheme import quantization_of


class SlotLayer:
    """What the model's attention of one layer sees as its cache: writes go to slots, reads come from them."""

    is_compileable = False
    is_sliding = False
    is_initialized = True

    def __init__(self, owner: AnyDecoder, index: int) -> None:
        self._owner = owner
        self._index = index

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, kv_heads, new, D] of the new positions -> all that may be attended to."""
        return self._owner.store(self._index, keys, values)

    def get_seq_length(self) -> int:
        """Positions before the new ones; masks and positions are given explicitly, so nothing depends on it."""
        return 0

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """(attended length, offset)."""
        return self._owner.window, 0

    def get_max_cache_shape(self) -> int:
        """Positions a slot can hold."""
        return self._owner.cache.shape[3]


class AnyDecoder:
    """A transformers model behind the SlotModel protocol.

    Attributes:
        window: positions attended to in the current call.
    """

    def __init__(self, folder: Path, *, slots: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.cache_utils import Cache

        config = folder_config.read_config(folder)
        _refuse_unknown_memory(config)
        _refuse_quantised(folder)
        self.dtype = dtype
        self.device = device
        self._module = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, attn_implementation="sdpa"
        ).to(device)
        self._module.eval().requires_grad_(False)
        for parameter in self._module.parameters():
            # transformers maps the file; memory of our own can be given back in sleep
            parameter.data = parameter.data.clone()
        text = self._module.config.get_text_config()
        self.vocab = int(text.vocab_size)
        self.live = _checkpoint_names(self._module)
        self.aliases = _tied_names(self._module, self.live)
        self._storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self.live.values()}
        self._sizes = {key: storage.nbytes() for key, storage in self._storages.items()}
        positions = getattr(text, "max_position_embeddings", None)
        if positions and max_len > positions:
            raise SlimeError(
                f"max_context {max_len} exceeds the model's {positions} positions", "lower engine.max_context"
            )
        heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        length = round_up(max_len, WINDOW)
        self.cache = KVCache((text.num_hidden_layers, slots, kv_heads, length, head_dim), dtype, device)
        self._view = Cache(layers=[SlotLayer(self, i) for i in range(text.num_hidden_layers)])
        self._rows: torch.Tensor = torch.arange(slots, device=device)
        self._where: torch.Tensor | None = None
        self._head = self._module.get_output_embeddings()
        self.window = 0
        self.window_step = WINDOW

    def store(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep new keys and values; called by the attention layers."""
        k, v, where = self.cache.k[index], self.cache.v[index], self._where
        if where is None:
            length = keys.shape[2]
            k[self._rows, :, :length] = keys
            v[self._rows, :, :length] = values
            return keys, values
        k[self._rows, :, where] = keys[:, :, 0]
        v[self._rows, :, where] = values[:, :, 0]
        count = len(self._rows)
        return k[:count, :, : self.window], v[:count, :, : self.window]

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, count: int, window: int) -> torch.Tensor:
        """One token per slot -> [M, vocab] float32 logits; rows beyond `count` are zero."""
        self._rows = torch.arange(count, device=self.device)
        self._where, self.window = positions[:count], window
        visible = torch.arange(window, device=self.device) <= positions[:count, None]
        mask = torch.zeros_like(visible, dtype=self.dtype).masked_fill_(~visible, float("-inf"))[:, None, None]
        hidden = self._forward(tokens[:count, None], positions[:count, None], mask)
        logits = torch.zeros(len(tokens), self.vocab, device=self.device)
        logits[:count] = self._to_logits(hidden[:, 0])
        return logits

    def prefill(self, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Fill the cache from position 0 -> [n, P, hidden]."""
        n, length = ids.shape
        self._rows, self._where, self.window = slots, None, length
        positions = torch.arange(length, device=self.device)
        hidden_from = positions[None, :] > positions[:, None]
        mask = torch.zeros(length, length, dtype=self.dtype, device=self.device).masked_fill_(
            hidden_from, float("-inf")
        )
        return self._forward(ids, positions.expand(n, -1), mask.expand(n, 1, -1, -1))

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        body = self._module.base_model
        result = body(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=self._view, use_cache=True
        )
        hidden: torch.Tensor = result.last_hidden_state
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, hidden] -> [M, vocab]."""
        return self._to_logits(hidden)

    def _to_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        text = self._module.config.get_text_config()
        logits: torch.Tensor = self._head(hidden).float()[..., : self.vocab]
        # the two numbers by which some families change their logits after the output matrix
        scale, cap = getattr(text, "logits_scaling", None), getattr(text, "final_logit_softcapping", None)
        if scale:
            logits = logits / scale
        if cap:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def weights_changed(self) -> None:
        """Nothing is derived."""

    def free_weights(self) -> None:
        """Give the memory back."""
        for storage in self._storages.values():
            storage.resize_(0)

    def allocate_weights(self) -> None:
        """Take it again, content undefined."""
        for key, storage in self._storages.items():
            storage.resize_(self._sizes[key])

    @property
    def weight_bytes(self) -> int:
        """Memory held by weights now."""
        return sum(storage.nbytes() for storage in self._storages.values())


def _refuse_quantised(folder: Path) -> None:
    """transformers would read the weights by itself, and wants a GPU for that."""
    if quantization_of(files.read_json(folder / "config.json")):
        raise SlimeError(
            f"{folder}: the embedded engine has no layout of its own for this family, and reads it unquantised only",
            f"slime export --from {folder} --out DIR writes it dequantised",
        )


def _refuse_unknown_memory(config: dict[str, Any]) -> None:
    """Architectures whose memory is not one key and one value per position would silently be wrong here."""
    problem = ""
    text = config.get("text_config") or config
    kinds = set(text.get("layer_types") or ["full_attention"])
    if kinds - {"full_attention"} or folder_config.uses_sliding_window(text):
        problem = f"layers of kind {', '.join(sorted(kinds - {'full_attention'})) or 'sliding attention'}"
    elif config.get("is_encoder_decoder") or "vision_config" in config or "audio_config" in config:
        problem = "inputs besides text"
    elif any(key in text for key in ("ssm_cfg", "mamba_d_state", "state_size", "kv_lora_rank", "alibi")):
        problem = "a memory that is not keys and values per position"
    if problem:
        raise SlimeError(
            f"the embedded engine cannot run model_type {config.get('model_type')!r}: it has {problem}",
            'use --set engine.backend="sglang" with engine.urls',
        )


def _checkpoint_names(module: Any) -> dict[str, torch.Tensor]:
    """Weights under their names in the checkpoint, tied ones once."""
    seen: set[int] = set()
    live = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.data_ptr() not in seen:
            seen.add(parameter.data_ptr())
            live[name] = parameter.data
    return live


def _tied_names(module: Any, live: dict[str, torch.Tensor]) -> dict[str, str]:
    owner = {tensor.data_ptr(): name for name, tensor in live.items()}
    every = dict(module.named_parameters(remove_duplicate=False))
    return {name: owner[p.data_ptr()] for name, p in every.items() if name not in live}
