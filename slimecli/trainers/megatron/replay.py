"""Routing replay: the training pass sends every token through the experts that the log-prob pass chose for it.

With several optimizer steps per rollout the weights change between the two, and with them the choice of experts: the
ratio of new to old probability would then compare two different networks. `[megatron] moe_enable_routing_replay = true`
asks for it. Choices are kept by the tokens of a sample, since micro-batches and ranks are shared out anew in each pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimecli.batch import TrainBatch
from slimecli.errors import SlimeError
from slimecli.trainers.megatron.micro_batches import MicroBatch
from slimecli.trainers.megatron.prediction import PREFIX


class Routing:
    """The routers of this rank, and what they chose.

    A pass is wrapped in `start_recording`/`finish_recording` or `start_replay`/`finish_replay`; inside it, every
    forward pass of a chunk is told by `before` and `after`.
    """

    def __init__(self, chunks: list[Any], top_k: int, *, split: bool) -> None:
        """Args:
        chunks: the bare model chunks.
        split: tensor-parallel ranks have a part of the positions each (sequence parallelism).
        """
        self._routers = {id(c): _routers(c) for c in chunks}
        self._top_k = top_k
        self._split = split
        self._chosen: dict[bytes, dict[int, Tensor]] = {}
        """tokens of a sample -> chunk -> [tokens, routers, top_k] int16"""
        self._tables: dict[int, Tensor] = {}
        """chunk -> [T, routers, top_k] int32 of the pass that is being recorded"""
        self._replaying = False

    def start_recording(self, batch: TrainBatch, device: torch.device) -> None:
        """Forget earlier choices and keep those of the next pass."""
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        self._chosen = {}
        self._tables = {
            chunk: torch.zeros(batch.num_tokens, len(routers), self._top_k, dtype=torch.int32, device=device)
            for chunk, routers in self._routers.items()
        }
        self._set(RouterReplayAction.RECORD)

    def finish_recording(self, batch: TrainBatch) -> None:
        """Tell every rank of this pipeline stage what was chosen. Collective over the stage."""
        from megatron.core import parallel_state

        self._set(None)
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        keys, lengths = _keys(batch), batch.lengths.tolist()
        for chunk, table in self._tables.items():
            # every token was seen by exactly one rank
            dist.all_reduce(table, group=group)
            parts = torch.split(table.to(torch.int16).cpu(), lengths)
            for key, part in zip(keys, parts, strict=True):
                self._chosen.setdefault(key, {})[chunk] = part
        self._tables = {}

    def start_replay(self, batch: TrainBatch) -> float:
        """Replay in the next pass if its samples were recorded; returns 1.0 if so, 0.0 if none was."""
        keys = _keys(batch)
        known = sum(key in self._chosen for key in keys)
        if 0 < known < len(keys):
            raise SlimeError(
                f"{len(keys) - known} of {len(keys)} samples have no recorded experts to replay",
                "step on samples of the batch that log_probs was last called with",
            )
        self._replaying = known > 0
        return float(self._replaying)

    def finish_replay(self) -> None:
        """Route freely again."""
        self._replaying = False
        for router in self._all():
            router.clear_indices()
        self._set(None)

    def before(self, chunk: Any, micro_batch: MicroBatch) -> None:
        """A forward pass of a chunk begins."""
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        if not self._replaying:
            return
        routers = self._routers[id(chunk)]
        if not routers:
            return
        known = torch.cat([self._chosen[key][id(chunk)] for key in _keys(micro_batch.batch)])
        padding = torch.arange(self._top_k, dtype=known.dtype).expand(1, len(routers), -1)
        chosen = torch.cat([known, padding])[self._part(micro_batch.sources)].long()
        for number, router in enumerate(routers):
            router.set_target_indices(chosen[:, number])
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def after(self, chunk: Any, micro_batch: MicroBatch, places: Tensor) -> None:
        """A forward pass of a chunk has ended.

        Args:
            places: [T'] where the micro-batch's tokens stand in the pass's batch; empty if it does not count.
        """
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        routers = self._routers[id(chunk)]
        if self._replaying:
            # routers that are asked before the next forward pass are asked by recomputation, oldest first
            for router in routers:
                router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        elif self._tables and len(places) and routers:
            sources = self._part(micro_batch.sources)
            real = sources < len(places)
            table = self._tables[id(chunk)]
            chosen = torch.stack([router.get_recorded_indices() for router in routers], 1).to(table.dtype)
            table[places[sources[real]].to(table.device)] = chosen[real.to(table.device)]

    def _part(self, sources: Tensor) -> Tensor:
        """What this tensor-parallel rank has of the local positions."""
        from megatron.core import parallel_state

        if not self._split:
            return sources
        ranks: int = parallel_state.get_tensor_model_parallel_world_size()
        rank: int = parallel_state.get_tensor_model_parallel_rank()
        return torch.chunk(sources, ranks)[rank]

    def _all(self) -> list[Any]:
        return [router for routers in self._routers.values() for router in routers]

    def _set(self, action: Any) -> None:
        for router in self._all():
            router.set_router_replay_action(action)


def _routers(chunk: Any) -> list[Any]:
    """megatron-core's RouterReplay of every layer with experts. Prediction layers are not among them: the pass that is
    recorded has none."""
    named = chunk.named_modules()
    found = (getattr(module, "router_replay", None) for name, module in named if not name.startswith(PREFIX))
    return [replay for replay in found if replay is not None]


def _keys(batch: TrainBatch) -> list[bytes]:
    """What a sample is known by: choices depend on its tokens and the weights, on nothing else."""
    return [tokens.numpy().tobytes() for tokens in torch.split(batch.tokens, batch.lengths.tolist())]
