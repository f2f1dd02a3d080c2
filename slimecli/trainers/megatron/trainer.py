"""The Megatron trainer: megatron-core models, schedules and optimizer behind the Trainer protocol.

Every rank is handed the whole batch. Data-parallel ranks take their share of the micro-batches, context-parallel ranks
their part of every sample, tensor-parallel ranks their part of every matrix, pipeline stages their layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimecli import env
from slimecli.algos import algorithm
from slimecli.batch import TrainBatch
from slimecli.errors import DataError, SlimeError
from slimecli.model_specs import ModelSpec
from slimecli.protocols import ModelName
from slimecli.recipe import Recipe
from slimecli.trainers import _parallel
from slimecli.trainers._frozen import lacking
from slimecli.trainers._loss import Tally, weighted_loss, weighted_value_loss
from slimecli.trainers._offload import DeviceHolder, OneAtATime, Resting, awake
from slimecli.trainers.megatron import prediction, runtime, weights
from slimecli.trainers.megatron.arguments import settings_of
from slimecli.trainers.megatron.bridges import BRIDGES
from slimecli.trainers.megatron.critic import ValuePasses
from slimecli.trainers.megatron.frozen import Frozen
from slimecli.trainers.megatron.micro_batches import MicroBatch
from slimecli.trainers.megatron.model import build_chunks
from slimecli.trainers.megatron.network import Network
from slimecli.trainers.megatron.passes import Passes, is_reporter
from slimecli.trainers.megatron.quiet import silence
from slimecli.trainers.megatron.replay import Routing
from slimecli.types import StepStats
from slimecli.weights.check import spec_of
from slimecli.weights.hf import HfFolder

CRITIC = "critic"
"""folder of the critic's state in a checkpoint"""


class MegatronTrainer(DeviceHolder):
    """Satisfies slimecli.protocols.Trainer."""

    def __init__(self, recipe: Recipe, model_dir: Path, *, total_steps: int) -> None:
        env.set_threads(recipe.trainer.threads)
        env.set_cuda_connections()
        silence(on_gpu=torch.cuda.is_available())
        folder = HfFolder(model_dir)
        self._spec = spec_of(folder)
        self._model_dir = model_dir
        self._section = recipe.trainer
        self._algo = recipe.algo
        self._algorithm = algorithm(recipe.algo.name)
        self._total_steps = total_steps
        self._publish_dtype: torch.dtype = getattr(torch, recipe.model.dtype)
        self._bridge = BRIDGES[recipe.trainer.bridge]
        self._settings = settings_of(recipe, self._spec, on_gpu=torch.cuda.is_available())
        self._device, self._rank, self._world = runtime.start(self._settings, recipe.trainer.processes, recipe.seed)
        self._trained = self._spec if self._settings.prediction else replace(self._spec, mtp=0)
        bare = build_chunks(self._spec, self._settings, self._device)
        self._frozen = Frozen(recipe, bare, folder, self._device)
        has_critic = self._algorithm.returns is not None
        rests = recipe.algo.critic_warmup * recipe.trainer.steps_per_rollout * has_critic
        self._policy = Network(bare, self._settings, recipe.trainer, rests=rests)
        self._passes = self._make_passes(Passes)
        if self._settings.prediction:
            from slimecli.trainers.megatron.heads import Heads

            self._passes.heads = Heads(bare, self._settings)
        moe, layout = self._spec.moe, self._settings.layout
        replays = moe is not None and self._settings.transformer.get("moe_enable_routing_replay")
        self._routing = Routing(bare, moe.top_k, split=layout.sp) if moe and replays else None
        self._passes.routing = self._routing
        self._turns = OneAtATime(self._device)
        if has_critic and recipe.algo.critic_offload:
            self._turns.join("policy", self._policy)
        self._critic = self._make_critic(folder) if has_critic else None
        if has_critic and recipe.algo.critic_offload:
            self._turns.join("critic", self._critic)
        self._values = self._make_passes(ValuePasses)
        self._steps_done = 0
        self._resting = Resting(self, self._device)

    # -- protocol ----------------------------------------------------------------------------------------------------

    @awake
    @torch.no_grad()
    def log_probs(self, batch: TrainBatch, model: ModelName = "policy") -> Tensor:
        """[T] float32 log-probability of each trained target, or the critic's value before it; 0 where the loss mask
        is 0. On the CPU, on every rank."""
        if model == "critic":
            if self._critic is None:
                raise lacking(model)
            self._turns.take("critic")
            self._critic.gather()
            return self._outputs(self._critic.chunks, self._values, batch)
        self._turns.take("policy")
        # what the training pass replays is what the policy chose that its probabilities are compared with
        records = self._routing if model in ("policy", "old_policy") else None
        if records:
            records.start_recording(batch, self._device)
        if model == "policy":
            self._policy.gather()
            log_probs = self._outputs(self._policy.chunks, self._passes, batch)
        else:
            with self._frozen.ready(model, self._policy, self._passes, batch) as (chunks, passes):
                log_probs = self._outputs(chunks, passes, batch)
        if records:
            records.finish_recording(batch)
        return log_probs

    def _outputs(self, chunks: list[Any], passes: Passes, batch: TrainBatch) -> Tensor:
        """[T] first output of a model, on every rank."""
        found: list[Tensor] = []

        def use(micro_batch: MicroBatch, outputs: tuple[Tensor, ...], counts: bool) -> Tensor:
            if counts:
                found.append(outputs[0])
            return outputs[0].sum()

        with runtime.evaluating(chunks):
            shares = passes.run(chunks, batch, self._temperature(batch), use, forward_only=True)
        result = torch.zeros(batch.num_tokens, device=self._device)
        if is_reporter():
            for places, values in zip(shares, found, strict=True):
                result[places.to(self._device)] = values
        _parallel.add_up(result, self._world)
        return result.cpu()

    @awake
    def step(self, batch: TrainBatch) -> StepStats:
        """One optimizer step."""
        number = self._steps_done + 1
        trained = int(batch.loss_mask.sum())
        if not trained:
            raise SlimeError(f"optimizer step {number}: no token of the batch is trained on", "look at the loss masks")
        if "reference" in self._frozen and batch.ref_log_probs is None:
            raise SlimeError("the batch has no ref_log_probs", 'set them by Trainer.log_probs(batch, "reference")')
        tally = Tally()
        replayed = self._learn(batch, tally)
        self._policy.check(number)
        extra = {"routing_replayed": replayed} if self._routing else {}
        if self._critic is not None:
            extra["critic_grad_norm"] = self._step_critic(self._critic, batch, tally)
        self._turns.take("policy")
        norm, lr = self._policy.update(number, self._total_steps)
        self._steps_done = number
        sums, largest = _over_all_ranks(tally)
        loss = sums.pop("loss")
        means = {k: v / trained for k, v in sums.items()} | largest | extra
        budget = self._section.max_tokens_per_micro_batch
        means["oversized_samples"] = float((batch.lengths > budget * self._settings.layout.cp).sum())
        weighted = int((batch.loss_weight != 0).sum())
        return StepStats(loss=loss, grad_norm=norm, lr=lr, tokens=weighted, metrics=means)

    @awake
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, full tensor in model.dtype), one tensor alive at a time. Collective: every rank must iterate.

        Iterated to the end, they are what `old_policy` is from then on.
        """
        self._turns.take("policy")
        self._policy.gather()
        folder = HfFolder(self._model_dir)
        trained = self._bridge.hf_tensors(self._policy.bare, self._trained, self._publish_dtype, folder)
        yield from prediction.with_copies(trained, folder, self._spec)
        for name, tensor in prediction.untrained(folder, self._carried, self._publish_dtype):
            yield name, tensor.to(self._device)  # as the others, whose bytes are handed over from device memory
        for name, tensor in weights.carried(folder, self._spec):
            yield name, tensor.to(self._device, self._publish_dtype)
        self._frozen.published()

    @awake
    def save(self, folder: Path) -> None:
        """A torch_dist checkpoint of weights, optimizer and schedule position."""
        self._turns.take("policy")
        self._policy.save(folder, self._steps_done, self._carried, self._model_dir)
        if self._critic is not None:
            if self._rank == 0:
                (folder / CRITIC).mkdir()
            self._turns.take("critic")
            self._critic.save(folder / CRITIC, self._steps_done, self._spec, None)

    @awake
    def load(self, folder: Path) -> None:
        """Inverse of save, at any layout."""
        self._turns.take("policy")
        prediction.check_resume(folder, trains=bool(self._trained.mtp))
        self._steps_done = self._policy.load(folder)
        self._frozen.published()
        if self._critic is not None:
            self._turns.take("critic")
            steps = self._critic.load(folder / CRITIC)
            if steps != self._steps_done:
                raise DataError(
                    f"{folder / CRITIC} is of optimizer step {steps}, and the policy beside it of {self._steps_done}",
                    "resume from another checkpoint",
                )

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _carried(self) -> ModelSpec:
        """The model with the prediction layers that stay as its folder has them."""
        return replace(self._spec, mtp=self._spec.mtp - self._trained.mtp)

    def _make_passes(self, kind: type[Passes]) -> Passes:
        budget, chunk = self._section.max_tokens_per_micro_batch, self._section.logits_chunk_tokens
        return kind(self._settings, budget, chunk, self._spec.vocab, self._device)

    def _make_critic(self, folder: HfFolder) -> Network:
        """The policy's first weights without its output layer, and a learning rate of its own."""
        bare = build_chunks(self._spec, self._settings, self._device, with_value_head=True)
        self._bridge.load_hf(bare, folder, self._spec)
        section = self._section.model_copy(update={"lr": self._algo.critic_lr or self._section.lr})
        return Network(bare, self._settings, section)

    def _learn(self, batch: TrainBatch, tally: Tally) -> float:
        """The policy's gradients; returns whether routing was replayed (1.0) or not."""

        def use(micro_batch: MicroBatch, outputs: tuple[Tensor, ...], counts: bool) -> Tensor:
            log_probs, entropy, *ahead = outputs
            loss = weighted_loss(
                self._algorithm, self._algo, micro_batch.batch, log_probs, entropy, tally, counts=counts
            )
            if not ahead:
                return loss
            of_layers = prediction.weighted_loss(ahead, micro_batch.batch, tally, counts=counts)
            return loss + self._settings.prediction * of_layers

        self._turns.take("policy")
        self._policy.zero()
        if self._settings.prediction:
            self._policy.gather()  # the embedding, for the last pipeline stage
        replayed = self._routing.start_replay(batch) if self._routing else 0.0
        try:
            self._passes.run(self._policy.chunks, batch, self._temperature(batch), use, forward_only=False)
        finally:
            if self._routing:
                self._routing.finish_replay()
        return replayed

    def _step_critic(self, critic: Network, batch: TrainBatch, tally: Tally) -> float:
        """The critic's optimizer step, after the policy's gradients were seen to be numbers; returns the norm of its
        gradient."""

        def use(micro_batch: MicroBatch, outputs: tuple[Tensor, ...], counts: bool) -> Tensor:
            return weighted_value_loss(outputs[0], micro_batch.batch, self._algo.value_clip, tally, counts=counts)

        number = self._steps_done + 1
        self._turns.take("critic")
        critic.zero()
        self._values.run(critic.chunks, batch, self._temperature(batch), use, forward_only=False)
        critic.check(number)
        return critic.update(number, self._total_steps)[0]

    def _temperature(self, batch: TrainBatch) -> float:
        return batch.temperature if self._algorithm.needs_rollout else 1.0


def _over_all_ranks(tally: Tally) -> tuple[dict[str, float], dict[str, float]]:
    """Sums and maxima over the reporting ranks, told to all; the names are known on the last pipeline stage only."""
    mine = (
        {k: float(v) for k, v in tally.sums.items()},
        {k: float(v) for k, v in tally.largest.items()},
    )
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine if is_reporter() else None)
    sums: dict[str, float] = {}
    largest: dict[str, float] = {}
    for told in gathered:
        for name, value in (told or ({}, {}))[0].items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in (told or ({}, {}))[1].items():
            largest[name] = max(largest.get(name, 0.0), value)
    return sums, largest
