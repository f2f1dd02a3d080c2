"""Opens what a stage needs from a run directory and wires it to the loop: commands hold a Session, the loop Parts.

Everything is opened on first use, so that `slime rollout` never loads a trainer and `slime train` never an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from slimecli import console, files
from slimecli.algos import algorithm
from slimecli.clock import Clock
from slimecli.cluster import Cluster, open_cluster, sync_kind
from slimecli.cluster.turns import Phase, Rests, Turns, nobody_waits
from slimecli.errors import DataError, MissingStageError, SlimeError
from slimecli.frozen import loadable
from slimecli.loop import Collector, Parts
from slimecli.pipeline import layout_change
from slimecli.protocols import RolloutEngine, Trainer
from slimecli.publishing import fingerprint, publish
from slimecli.recipe import Recipe
from slimecli.recipe_rollout import EvalSetSection
from slimecli.recipe_sections import DataSection
from slimecli.recording import Recorder, StepListener, load_data_state
from slimecli.rollout.ahead import AheadCollector, are_usable
from slimecli.rollout.answering import Answering
from slimecli.rollout.args import HookArgs
from slimecli.rollout.collect import Collection, DemonstrationCollector, RecordedCollector, RolloutCollector
from slimecli.rollout.continuous import ContinuousCollector
from slimecli.rollout.custom import close_generate, load_generate, wants_messages
from slimecli.rollout.eval_sets import EvalSet, load_sets
from slimecli.rollout.evaluate import evaluate
from slimecli.rollout.generate import Generator
from slimecli.rollout.loop_thread import LoopThread, Runner, cancel_others
from slimecli.rollout.open_source import open_source
from slimecli.rollout.served import address_of, reward_of, served
from slimecli.rollout.source import DataSource, PromptSource
from slimecli.rollout.teacher import Teacher
from slimecli.rollout.versions import as_prompts
from slimecli.rundir import RunDir
from slimecli.serving.live_collect import LiveCollector, NoEngine
from slimecli.serving.live_source import LiveSource
from slimecli.sync.delivery import clean_up
from slimecli.topology import named_model
from slimecli.types import Sample
from slimecli.weights.datasets import localise


def start_weights(run: RunDir, recipe: Recipe) -> Path:
    """HF folder of the weights before step 1: the SFT stage's result, or the model as it came."""
    folder = RunDir(run.sft_dir).weights_dir(recipe.sft.steps) if recipe.sft.steps else run.model_dir
    if not files.is_committed(folder):
        stage = "sft" if recipe.sft.steps else "model"
        raise MissingStageError(
            f"run {run.name} has no starting weights ({folder})",
            f"slime run --resume --run {run.quoted} --until {stage}",
        )
    return folder


def step_weights(run: RunDir, recipe: Recipe, step: int) -> Path:
    """HF folder of the weights after `step`."""
    if step == 0:
        return start_weights(run, recipe)
    folder = run.weights_dir(step)
    if not files.is_committed(folder):
        raise MissingStageError(f"run {run.name} has no weights of step {step}", f"slime train --run {run.quoted}")
    return folder


Record = Callable[[int, Collection], None]
"""(step, batch) -> begin to write it down"""


class Session:
    """One run, opened for work.

    Args:
        run: the run directory; the caller holds its lock.
        recipe: resolved recipe.
        cluster: where trainer and engines run; `local` for single commands.
        on_step: called after every committed step.
    """

    def __init__(
        self,
        run: RunDir,
        recipe: Recipe,
        cluster: str = "local",
        on_step: StepListener | None = None,
        shared_cluster: Cluster | None = None,
    ) -> None:
        self.run = run
        self.recipe = recipe
        # generation that runs ahead goes on between two calls, and needs a thread of its own for that
        self.aio: Runner = LoopThread() if recipe.rollout.overlaps else asyncio.Runner()
        self.clock = Clock()
        self.backend = cluster
        self._cluster = shared_cluster
        self._owns_cluster = shared_cluster is None
        self._trainer: Trainer | None = None
        self._engine: RolloutEngine | None = None
        self.recorder = Recorder(run, recipe, self.clock, lambda *args: self.cluster.stage(*args), on_step)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as stack:
            if self._cluster is not None and self._owns_cluster:
                stack.callback(self._cluster.close)
            stack.callback(self.aio.close)
            stack.callback(close_generate)
            stack.callback(clean_up, self.run.sync_dir, sync_kind(self.recipe, self.backend))
            for engine in [self._engine, *vars(self).get("_models", {}).values()]:
                if engine is not None:
                    stack.callback(self.aio.run, engine.close())
            if self._trainer is not None:
                stack.callback(self._trainer.close)
            stack.callback(self.recorder.close)
            stack.callback(self.aio.run, cancel_others())

    @property
    def cluster(self) -> Cluster:
        """The cluster, started on first use."""
        if self._cluster is None:
            self._cluster = open_cluster(self.backend, self.recipe, self.run)
        return self._cluster

    # -- parts -------------------------------------------------------------------------------------------------------

    def trainer(self, at_step: int) -> Trainer:
        """The trainer with the state after `at_step`."""
        if self._trainer is None:
            recipe = loadable(self.recipe, self.run) if self.recipe.distill.teacher else self.recipe
            start, total = start_weights(self.run, recipe), recipe.optimizer_steps
            self._trainer = self.cluster.open_trainer(recipe, start, total)
            if at_step > 0:
                folder = self.run.checkpoint_dir(at_step)
                if change := layout_change(self.recipe, files.read_json(folder / files.DONE)):
                    console.note(change)
                self._trainer.load(folder / "trainer")
        return self._trainer

    def engine(self, weights: Path) -> RolloutEngine:
        """The engine, opened on an HF folder."""
        if self._engine is None and self.recipe.is_served_elsewhere:
            self._engine = NoEngine()
        if self._engine is None:
            self._engine = self.cluster.open_engine(self.recipe, weights)
        return self._engine

    @functools.cached_property
    def _models(self) -> Mapping[str, RolloutEngine]:
        """The frozen models that are served beside the policy."""
        return self.cluster.open_models(self.recipe)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The model's own tokenizer."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(
                self.run.model_dir, trust_remote_code=self.recipe.model.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise SlimeError(
                f"{self.run.model_dir} has no tokenizer that transformers can load: {error}",
                "put the tokenizer files of the model into its folder",
            ) from error

    @functools.cached_property
    def stop_token_ids(self) -> list[int]:
        """End tokens of the tokenizer and of generation_config.json."""
        ids = {self.tokenizer.eos_token_id} - {None}
        path = self.run.model_dir / "generation_config.json"
        if path.is_file():
            stated = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") or []
            ids |= set(stated if isinstance(stated, list) else [stated])
        return sorted(ids)

    def prompts(
        self, path: str, lines: Iterable[bytes] | None = None, section: DataSection | None = None
    ) -> list[Sample]:
        """A prompt file, or JSON lines that `path` is only a name of, as pending samples.

        Args:
            section: how rows are read; None: the recipe's.
        """
        from slimecli.data_tools.formats import read_lines
        from slimecli.data_tools.prompts import load_prompts, render_rows

        if lines is None:
            prompts = load_prompts(path, section or self.recipe.data, self.tokenizer)
        else:
            prompts = render_rows(read_lines(lines, path), section or self.recipe.data, self.tokenizer)
        as_messages = wants_messages(self.recipe)
        return [
            Sample(
                prompt=[dict(m) for m in p.messages] if as_messages and p.messages else p.text,
                tokens=list(p.token_ids),
                label=p.label,
                metadata=dict(p.metadata),
            )
            for p in prompts
        ]

    def source(self, at_step: int) -> DataSource:
        """Where training prompts come from, continued after `at_step`; what was under way then comes first."""
        source = open_source(self.recipe, self.run, self.prompts, self.tokenizer)
        if at_step > 0:
            state = load_data_state(self.run, at_step)
            source.restore(state["source"])
            source.give_back([[Sample.from_dict(s) for s in g] for g in state.get("waiting", [])])
        return source

    def generator(self, engine: RolloutEngine) -> Generator:
        """Engine, reward and hooks of the recipe, checked before anything is generated."""
        from slimecli.data_tools.rewards import load_reward

        section = self.recipe.rollout
        custom = section.custom_generate and load_generate(section.custom_generate, self.recipe)
        host, port = address_of(engine)
        return Generator(
            engine=engine,
            reward=load_reward(reward_of(self.recipe, self._models)),
            args=HookArgs(
                self.recipe,
                host,
                port,
                engine=engine,
                tokenizer=self.tokenizer,
                model_dir=str(self.run.model_dir),
                models=self._models,
            ),
            timeout_s=section.request_timeout_s,
            group_reward=self.recipe.reward.group,
            custom=custom or None,
        )

    def collector(self, source: DataSource, generator: Generator) -> RolloutCollector:
        """Rollouts for the next prompts of the source, when they are asked for."""
        return RolloutCollector(self.recipe, source, self._answering(generator))

    def _answering(self, generator: Generator) -> Answering:
        from slimecli.data_tools.filters import load_filter

        name = self.recipe.rollout.dynamic_filter
        generator = dataclasses.replace(generator, teacher=self._teacher(), decode=self._decode)
        return Answering(self.recipe, generator, self.stop_token_ids, load_filter(name) if name else None)

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _collecting(self, source: DataSource, generator: Generator, start: int) -> tuple[Collector, Record]:
        """The collector of the recipe, and what the loop has to do to record its batches."""
        if isinstance(source, LiveSource):
            live = LiveCollector(self.recipe, source, generator)
            return live, lambda step, batch: self.recorder.store(step, batch, live.cursor())
        recorder, stored = self.recorder, self.recorder.stored_ahead(start)
        if not are_usable(stored, self.recipe):
            source.give_back([as_prompts(g) for batch in stored.values() for g in batch.groups])
            stored = {}
        if self.recipe.rollout.fully_async:
            stream = ContinuousCollector(self.recipe, source, self._answering(generator), start=start)
            return stream, lambda step, batch: recorder.store(step, batch, stream.cursor())
        inner = self.collector(source, generator)
        if not self.recipe.rollout.overlaps:
            return inner, functools.partial(recorder.record, inner)
        return AheadCollector(self.recipe, inner, start=start, stored=stored, store=recorder.store), _is_recorded

    def _teacher(self) -> Teacher | None:
        """Client of the server that judges answers; a teacher of the trainer's own needs none."""
        from slimecli.engines.http import HttpEngine

        url, timeout_s = self.recipe.distill.url, self.recipe.rollout.request_timeout_s
        name = named_model(url)
        return (
            Teacher(served(self._models, name) if name else HttpEngine(url, timeout_s=timeout_s), timeout_s)
            if url
            else None
        )

    def eval_sets(self) -> list[EvalSet]:
        """The holdout and the recipe's own sets."""
        sets = dict(self.recipe.eval.sets)
        if (self.run.data_dir / "holdout.jsonl").is_file():
            sets.setdefault("holdout", EvalSetSection(path=str(self.run.data_dir / "holdout.jsonl")))
        if not sets:
            raise DataError("there is nothing to evaluate on", "set data.holdout or eval.sets in the recipe")
        return self.load_eval_sets(sets)

    def load_eval_sets(self, sets: Mapping[str, EvalSetSection]) -> list[EvalSet]:
        """Read these sets."""
        template = str(getattr(self.tokenizer, "chat_template", None) or "")
        return load_sets(
            self.recipe, sets, lambda path, recipe: self.prompts(localise(path), section=recipe.data), template
        )

    # -- what the loop calls -----------------------------------------------------------------------------------------

    def parts(self, start: int) -> Parts:
        """Everything for the RL loop from step `start` on."""
        weights = step_weights(self.run, self.recipe, start)
        trainer, shares = self.trainer(start), self.cluster.colocated
        if shares:
            cast(Rests, trainer).sleep()
        engine = self.engine(weights)
        source, generator = self.source(start), self.generator(engine)
        sets = self.eval_sets() if self.recipe.eval.interval else []
        collector, record = self._collecting(source, generator, start)
        turns = Turns(cast(Rests, trainer), engine, self.aio.run, lambda: self.clock.phase("turns")) if shares else None
        return self._parts(
            trainer,
            collector,
            turn=nobody_waits if turns is None else turns.take,
            publish=functools.partial(publish, self, trainer, engine),
            measure=functools.partial(self.measure, generator, sets),
            record=record,
        )

    def recorded_parts(self, start: int) -> Parts:
        """The loop over samples that `slime rollout` left, without an engine."""
        trainer = self.trainer(start)
        publish = functools.partial(fingerprint, self, trainer)
        return self._parts(trainer, RecordedCollector(self.run), publish=publish, record=_is_recorded)

    def sft_parts(self, start: int) -> Parts:
        """The loop over demonstrations."""
        from slimecli.data_tools.conversations import load_conversations

        recipe = self.recipe
        path = self.run.data_dir / "sft.jsonl"
        if not path.is_file():
            raise DataError(
                f"run {self.run.name} has no demonstrations ({path.name})",
                "set data.demonstrations, or sft.data = a file of conversations; or sft.steps = 0",
            )
        rows = load_conversations(str(path), recipe.data, self.tokenizer)
        source = PromptSource(rows, 1, seed=recipe.seed, shuffle=recipe.data.shuffle)
        if start > 0:
            source.restore(load_data_state(self.run, start)["source"])
        collector = DemonstrationCollector(source, recipe.rollout.batch_size)
        return self._parts(self.trainer(start), collector, record=_is_recorded)

    def _parts(
        self,
        trainer: Trainer,
        collector: Collector,
        *,
        record: Record,
        publish: Callable[[int], dict[str, Any]] | None = None,
        measure: Callable[[int], dict[str, float]] | None = None,
        turn: Callable[[Phase], None] = nobody_waits,
    ) -> Parts:
        return Parts(
            run=self.run,
            recipe=self.recipe,
            algorithm=algorithm(self.recipe.algo.name),
            trainer=trainer,
            collector=collector,
            aio=self.aio,
            publish=publish,
            measure=measure,
            record=record,
            commit=functools.partial(self.recorder.commit, trainer, collector, turn),
            turn=turn,
            clock=self.clock,
        )

    def measure(self, generator: Generator, sets: list[EvalSet], step: int) -> dict[str, float]:
        """Sampled accuracy at every interval; greedy as well at the start and the end."""
        section, last = self.recipe.eval, step == self.recipe.steps
        if not section.interval or (step % section.interval and not last):
            return {}
        modes = {"sampled": False} | ({"greedy": True} if section.greedy and (step == 0 or last) else {})
        scores: dict[str, dict[str, Any]] = {}
        for mode, greedy in modes.items():
            work = evaluate(self.recipe, generator, sets, self.stop_token_ids, greedy=greedy)
            for name, result in self.aio.run(work).items():
                scores.setdefault(name, {})[mode] = result
        files.write_json(self.run.eval_path(step), {"step": step, "sets": scores})
        return {f"eval/{name}/{mode}": r["mean"] for name, modes_ in scores.items() for mode, r in modes_.items()}


def _is_recorded(step: int, batch: Collection) -> None:
    """The samples are on disk already, or need not be."""
