"""Forward and backward passes of a batch through megatron-core's pipeline schedules.

megatron-core is asked for plain sums: losses carry global denominators, so `calculate_per_token_loss` with a token
count of zero makes its gradients the sum over micro-batches and over data- and context-parallel ranks, undivided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slimecli.batch import TrainBatch, plan_micro_batches
from slimecli.trainers.megatron.arguments import Settings
from slimecli.trainers.megatron.log_probs import vocab_parallel_log_probs
from slimecli.trainers.megatron.micro_batches import MicroBatch, local_length, make_micro_batch, to_batch
from slimecli.trainers.megatron.replay import Routing

if TYPE_CHECKING:
    from slimecli.trainers.megatron.heads import Heads

QUANTISED = 128
"""positions of the largest block that Transformer Engine quantises at a time, fp8 and fp4"""
Use = Callable[[MicroBatch, tuple[Tensor, ...], bool], Tensor]
"""(micro-batch, outputs, whether it counts) -> [] loss; called on the last pipeline stage"""


@dataclass(frozen=True)
class _Item:
    places: Tensor
    """[T'] where its tokens stand in the batch; empty if it does not count"""
    micro_batch: MicroBatch
    counts: bool
    """False: it only keeps collectives in step"""


class Passes:
    """Runs batches through this rank's part of a model, whose outputs are ([T] log-probs, [T] entropy), and in training
    the [T] log-probs of each prediction layer that is trained."""

    def __init__(self, settings: Settings, budget: int, chunk: int, vocab: int, device: torch.device) -> None:
        self._settings = settings
        self._budget = budget
        self._chunk = chunk
        self._vocab = vocab
        self._device = device
        self.routing: Routing | None = None
        """set where the experts of one pass are to be replayed in another"""
        self.heads: Heads | None = None
        """set where prediction layers are trained"""

    def run(
        self, chunks: list[Any], batch: TrainBatch, temperature: float, use: Use, *, forward_only: bool
    ) -> list[Tensor]:
        """One pass over this rank's share of a batch; returns where the tokens of each micro-batch that counts stand in
        the batch.

        Args:
            chunks: the model, wrapped; several with interleaved pipelining.
            use: what is made of the outputs.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        items = self._items(batch)
        heads = None if forward_only else self.heads
        step = partial(self._forward, temperature=temperature, use=use, heads=heads)
        iterators = [iter(items) for _ in chunks]
        # the schedule divides it again; only interleaved pipelining, where all are of one length, looks at it
        length = items[0].micro_batch.token_ids.shape[1] * self._settings.layout.cp
        with heads.ready() if heads else nullcontext():
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iterators if len(chunks) > 1 else iterators[0],
                model=chunks if len(chunks) > 1 else chunks[0],
                num_microbatches=len(items),
                seq_length=length,
                micro_batch_size=1,
                forward_only=forward_only,
            )
        return [item.places for item in items if item.counts]

    def _items(self, batch: TrainBatch) -> list[_Item]:
        from megatron.core import parallel_state

        layout = self._settings.layout
        # interleaved pipelining takes micro-batches in groups of the pipeline's depth
        group = layout.pp if layout.vpp > 1 else 1
        plan = plan_micro_batches(batch.lengths.tolist(), self._budget * layout.cp, layout.dp * group)
        mine = parallel_state.get_data_parallel_rank() * group
        rank = parallel_state.get_context_parallel_rank()
        shares = [indices for part in plan[mine : mine + group] for indices in part]
        batches = [batch.select(indices or [0]) for indices in shares]
        multiple = local_multiple(self._settings)
        lengths = [local_length(b, context_ranks=layout.cp, multiple=multiple) for b in batches]
        if layout.vpp > 1:
            # megatron-core 0.16 mixes up the lengths of what two stages send each other both ways at once
            lengths = [max(lengths)] * len(lengths)
        items = []
        for indices, samples, length in zip(shares, batches, lengths, strict=True):
            micro_batch = make_micro_batch(
                samples, context_ranks=layout.cp, context_rank=rank, length=length, device=self._device
            )
            items.append(_Item(batch.positions(indices), micro_batch, bool(indices)))
        return items

    def _forward(
        self, iterator: Iterator[_Item], model: Any, *, temperature: float, use: Use, heads: Heads | None
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
        """megatron-core's forward_step_func."""
        item = next(iterator)
        micro_batch = item.micro_batch
        if self.routing is not None:
            self.routing.before(unwrap(model), micro_batch)
        output = model(
            input_ids=micro_batch.token_ids,
            position_ids=micro_batch.position_ids,
            attention_mask=None,
            packed_seq_params=micro_batch.packed(),
        )
        if self.routing is not None:
            self.routing.after(unwrap(model), micro_batch, item.places)

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            outputs = self._outputs(hidden, model, micro_batch, temperature)
            if heads is not None:
                ahead = enumerate(heads.hidden(hidden, micro_batch), start=1)
                outputs += tuple(self._ahead(h, model, micro_batch, temperature, k) for k, h in ahead)
            value = use(micro_batch, outputs, item.counts)
            return value, torch.zeros((), dtype=torch.int, device=self._device), {}

        return output, loss

    def _outputs(self, hidden: Tensor, model: Any, micro_batch: MicroBatch, temperature: float) -> tuple[Tensor, ...]:
        """Each [T], from hidden states of the last stage, [1, L, H] (or this rank's part of L)."""
        from megatron.core import parallel_state

        weight = output_weight(model)
        found = (micro_batch.rows, micro_batch.targets)
        group = parallel_state.get_context_parallel_group()
        values = self._log_probs(hidden, weight, found, temperature)
        return tuple(to_batch(v, micro_batch, group) for v in values)

    def _ahead(self, hidden: Tensor, model: Any, micro_batch: MicroBatch, temperature: float, count: int) -> Tensor:
        """[T] log-probs by a prediction layer, each at the place where the policy's of the same token stands.

        Args:
            hidden: of the layer that looks `count` tokens further ahead, as for `_outputs`.
        """
        from megatron.core import parallel_state

        rows, targets, places = micro_batch.predicted_ahead(count)
        values, _ = self._log_probs(hidden, output_weight(model).detach(), (rows, targets), temperature)
        return to_batch(values, micro_batch, parallel_state.get_context_parallel_group(), places)

    def _log_probs(
        self, hidden: Tensor, weight: Tensor, found: tuple[Tensor, Tensor], temperature: float
    ) -> tuple[Tensor, Tensor]:
        """([P] log-probs, [P] entropy) at some (local positions, targets) of [1, L, H] hidden states."""
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.mappings import (
            copy_to_tensor_model_parallel_region,
            gather_from_sequence_parallel_region,
        )

        rows = hidden[0].to(weight.dtype)
        # either operation adds up, in its backward pass, what each rank's part of the vocabulary says of the rows
        rows = (
            gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=True)
            if self._settings.layout.sp
            else copy_to_tensor_model_parallel_region(rows)
        )
        places, targets = found
        return vocab_parallel_log_probs(
            rows[places],
            weight,
            targets,
            temperature=temperature,
            chunk=self._chunk,
            vocab=self._vocab,
            group=parallel_state.get_tensor_model_parallel_group(),
        )


def local_multiple(settings: Settings) -> int:
    """What the positions of a rank are a multiple of: sequence parallelism divides them over tensor-parallel ranks, and
    Transformer Engine quantises whole blocks."""
    quantised = settings.transformer.get("fp8") or settings.transformer.get("fp4")
    return (settings.layout.tp if settings.layout.sp else 1) * (QUANTISED if quantised else 1)


def unwrap(model: Any) -> Any:
    """The GPTModel inside its data-parallel and precision wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


def output_weight(model: Any) -> Tensor:
    """[V / tp, H] this rank's rows of the output embedding, on the last pipeline stage."""
    gpt = unwrap(model)
    weight: Tensor = (
        gpt.shared_embedding_or_output_weight() if gpt.share_embeddings_and_output_weights else gpt.output_layer.weight
    )
    return weight


def is_reporter() -> bool:
    """True on the ranks whose values are counted: last pipeline stage, first tensor- and context-parallel rank."""
    from megatron.core import parallel_state

    return bool(
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )
