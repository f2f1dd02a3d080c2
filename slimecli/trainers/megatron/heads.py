"""Prediction layers (MTP) in training: layer k looks k tokens further ahead than the policy.

The policy does not learn from them: hidden states, embedding and output layer are taken as constants, so that the
layers follow the policy and leave it as it is. They run where the policy's hidden states become log-probs, on the last
pipeline stage, as a part of the loss.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec_for_backend,
)
from torch import Tensor

from slimecli.trainers.megatron.arguments import Settings
from slimecli.trainers.megatron.micro_batches import MicroBatch


def make_block(gpt: Any, layer: Any, count: int, stage: int | None) -> Any:
    """`count` prediction layers, uninitialised.

    Args:
        gpt: the policy, to whose own layers they make no difference.
        layer: spec of the transformer layer inside.
        stage: chunk of interleaved pipelining.
    """
    own = copy.copy(gpt.config)
    own.mtp_num_layers = count
    made = get_mtp_layer_spec_for_backend(layer, gpt_layer_specs.TESpecProvider())
    return MultiTokenPredictionBlock(
        config=own,
        spec=MultiTokenPredictionBlockSubmodules(layer_specs=[made] * count),
        vp_stage=stage,
        pg_collection=gpt.pg_collection,
    )


class Heads:
    """The prediction layers of a policy, in its training passes."""

    def __init__(self, chunks: list[Any], settings: Settings) -> None:
        """Args:
        chunks: the bare model chunks of this rank.
        """
        self._first, self._last = chunks[0], chunks[-1]
        self._split = settings.layout.sp
        self._recomputed = settings.transformer.get("recompute_granularity") == "full"
        self._table: Tensor | None = None
        self.is_here = hasattr(self._last, "mtp")
        """whether this rank has them"""

    @contextmanager
    def ready(self) -> Iterator[None]:
        """The embedding's weight is on the last pipeline stage inside. Collective."""
        self._table = self._embedding()
        try:
            yield
        finally:
            self._table = None

    def _embedding(self) -> Tensor | None:
        """[V / tp, H] this tensor-parallel rank's rows; None where no prediction layer is."""
        gpt = self._last
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return gpt.embedding.word_embeddings.weight.detach() if self.is_here else None
        if gpt.share_embeddings_and_output_weights:
            return gpt.output_layer.weight.detach() if self.is_here else None
        is_source = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        if not (is_source or self.is_here):
            return None
        table = self._first.embedding.word_embeddings.weight if is_source else gpt.output_layer.weight
        table = table.detach() if is_source else torch.empty_like(table)
        source = parallel_state.get_pipeline_model_parallel_first_rank()
        dist.broadcast(table, source, group=parallel_state.get_embedding_group())
        return table if self.is_here else None

    def hidden(self, hidden: Tensor, micro_batch: MicroBatch) -> list[Tensor]:
        """[1, L, H] hidden states of each prediction layer (or this rank's part of L).

        Args:
            hidden: the policy's last, of the same shape.
        """
        gpt, found = self._last, []
        x = hidden.detach().to(gpt.config.params_dtype).transpose(0, 1).contiguous()
        packed = micro_batch.packed()
        rotary = None
        if not gpt.config.multi_latent_attention:  # whose layers make their own
            rotary = gpt.rotary_pos_emb(micro_batch.longest, packed_seq=True)
        for depth, layer in enumerate(gpt.mtp.layers, start=1):

            def forward(x: Tensor, embedded: Tensor, layer: Any = layer) -> Tensor:
                out: Tensor = layer._proj_and_transformer_layer(
                    hidden_states=x, decoder_input=embedded, rotary_pos_emb=rotary, packed_seq_params=packed
                )
                return out

            embedded = self._embedded(micro_batch.ids_ahead(depth))
            if self._recomputed:
                # what a checkpoint is given must ask for gradients, or it has none for the weights inside
                x = tensor_parallel.checkpoint(forward, False, x.requires_grad_(), embedded)
            else:
                x = forward(x, embedded)
            found.append(x.transpose(0, 1))
        return found

    @torch.no_grad()
    def _embedded(self, ids: Tensor) -> Tensor:
        """[L, 1, H] embeddings of [1, L] token ids (or this rank's part of L)."""
        assert self._table is not None
        group = parallel_state.get_tensor_model_parallel_group()
        rank, rows = dist.get_rank(group), len(self._table)
        inside = (ids // rows == rank)[0, :, None, None]
        found = F.embedding(ids[0, :, None] % rows, self._table) * inside
        if dist.get_world_size(group) > 1:
            dist.all_reduce(found, group=group)
        return found.chunk(dist.get_world_size(group))[rank] if self._split else found
