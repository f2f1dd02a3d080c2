"""The critic: the policy's layers with one number per token in place of the output layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimecli.trainers.megatron.micro_batches import MicroBatch, to_batch
from slimecli.trainers.megatron.passes import Passes, unwrap

HEAD = "value_head.weight"
"""its name in checkpoints"""


class ValueHead(nn.Module):
    """Stands where a GPTModel has its output layer; starts at 0, so that the first advantages are the returns.

    Every tensor-parallel rank has it whole and sees all hidden states, so that all have the same gradient.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Hidden states as they are: values are made of them where all of a sample's are together."""
        return hidden, None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Whole on every rank, under a name of its own: what is called output_layer has a row per token."""
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {"weight": self.weight},
            prefix,
            None,
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )
        replace_prefix_for_sharding(sharded, prefix + "weight", HEAD)
        return sharded


class ValuePasses(Passes):
    """Passes whose outputs are ([T] float32 value before each trained token,)."""

    def _outputs(self, hidden: Tensor, model: Any, micro_batch: MicroBatch, temperature: float) -> tuple[Tensor, ...]:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        rows = hidden[0]
        if self._settings.layout.sp:
            # all ranks compute the same values from them, so each keeps the gradient of its own part
            rows = gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=False)
        head = unwrap(model).output_layer.weight.float()
        values = F.linear(rows[micro_batch.rows].float(), head).squeeze(1)
        return (to_batch(values, micro_batch, parallel_state.get_context_parallel_group()),)
