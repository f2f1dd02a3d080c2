"""Trainer checkpoints in Megatron's torch_dist form: weights, optimizer and position, loadable at any other layout.

    latest_checkpointed_iteration.txt, iter_NNNNNNN/   what Megatron-LM's --load takes
    hf/                                                config and tokenizer, so that `slime convert` needs nothing else
    critic/                                            the same of a critic, without hf/

There is no random state: what might be random in a step is seeded by (run seed, step).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from slimecli import files
from slimecli.errors import DataError, SlimeError
from slimecli.headers import HF_FILES, TRACKER
from slimecli.model_specs import ModelSpec
from slimecli.trainers.megatron.optimizer import go_on, is_offloaded, make_moments, parts
from slimecli.weights.hf import HfFolder, copy_companions
from slimecli.weights.torch_dist import TorchDist, find_iteration

_GO_ON = "`slime run --resume` goes on from the checkpoint before"


def save(folder: Path, chunks: list[Any], optimizer: Any, step: int, spec: ModelSpec, model_dir: Path | None) -> None:
    """Write everything that `load` needs into an existing folder. Collective.

    Args:
        spec: prediction layers that it states are not among the chunks: they go along as the model's folder has them.
        model_dir: the HF folder whose config and tokenizer go with it; None: none do.
    """
    from megatron.core import dist_checkpointing

    iteration = folder / f"iter_{step:07d}"
    if dist.get_rank() == 0:
        iteration.mkdir()
    dist.barrier()
    _hand_results_over_here()
    for part in parts(optimizer):
        make_moments(part)
    tree = _tree(chunks, optimizer, is_loading=False)
    _leave_out(tree["optimizer"])
    tree |= {"iteration": step, "checkpoint_version": 3.0, "args": _arguments(spec)}
    if dist.get_rank() == 0 and model_dir is not None:
        tree |= _carried(spec, model_dir)
    with _explaining(iteration):
        dist_checkpointing.save(tree, str(iteration), content_metadata=_content())
    if dist.get_rank() == 0:
        files.write_text(folder / TRACKER, str(step))
        if model_dir is not None:
            (folder / HF_FILES).mkdir()
            copy_companions(model_dir, folder / HF_FILES)
    dist.barrier()


@contextlib.contextmanager
def _explaining(iteration: Path) -> Iterator[None]:
    """A rank that could not write is told as every full disk is: torch's exception for it is not even an Exception."""
    try:
        with files.explain_disk_errors(iteration):
            yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        number = re.search(r"\[Errno (\d+)\]", str(cause))  # the error itself does not come from another process
        with files.explain_disk_errors(iteration):
            if number:
                raise OSError(int(number[1]), os.strerror(int(number[1])), str(iteration)) from error
        if _is_cut_short(cause):
            raise _cut_short(iteration) from error
        raise SlimeError(f"{iteration} could not be written by trainer process {rank}: {cause}", _GO_ON) from error
    except RuntimeError as error:
        if _is_cut_short(error):
            raise _cut_short(iteration) from error
        raise


def _is_cut_short(error: BaseException) -> bool:
    """Whether torch's zip writer says that less was written than it gave."""
    return any(said in str(error) for said in ("unexpected pos", "iostream error", "PytorchStreamWriter failed"))


def _cut_short(iteration: Path) -> SlimeError:
    free = shutil.disk_usage(iteration.parent).free / 1e9
    causes = f"the disk is full ({free:.2f} GB free now), a quota is used up or `ulimit -f` is reached"
    return SlimeError(f"{iteration}: a write was cut short: {causes}", f"make room; {_GO_ON}")


def load(folder: Path, chunks: list[Any], optimizer: Any, *, rests: int = 0) -> int:
    """Fill model and optimizer from a checkpoint of any layout; returns the optimizer steps made. Collective.

    Args:
        rests: first steps in which this model did not learn.
    """
    from megatron.core import dist_checkpointing

    iteration = find_iteration(folder)
    _check_safe(iteration)
    for part in parts(optimizer):
        make_moments(part)
    tree = _tree(chunks, optimizer, is_loading=True)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            loaded = dist_checkpointing.load(tree, str(iteration))
    except (CheckpointException, KeyError, RuntimeError, ValueError, AssertionError) as error:
        raise DataError(
            f"{iteration} does not fit this model: {_reason(error)}",
            "resume with the model it was saved with, and its use_distributed_optimizer of [megatron]",
        ) from error
    for name, chunk in zip(_names(chunks), chunks, strict=True):
        chunk.load_state_dict(loaded[name], strict=True)
    step = int(loaded["iteration"])
    learnt = max(step - rests, 0)
    optimizer.load_state_dict(_at_step(optimizer, loaded["optimizer"], learnt))
    for part in parts(optimizer):
        go_on(part, learnt)
    return step


def _reason(error: BaseException) -> str:
    """What went wrong, of a collective failure the first rank's."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if not isinstance(error, KeyError):
        return str(error)
    name, _, _ = str(error.args[0]).partition(" from model not in state dict")  # and then all that there is
    return f"it has no {name!r}"


def _at_step(optimizer: Any, loaded: dict[Any, Any], step: int) -> dict[Any, Any]:
    """The loaded state with this optimizer's own parameter groups: which there are depends on the layout, and all that
    is in them follows from the recipe and the step."""
    members = parts(optimizer)
    found = {}
    for number, part in enumerate(members):
        state = dict(loaded if len(members) == 1 else loaded[number])
        own = part.state_dict()
        counted = {} if is_offloaded(part) else {"step": step}
        groups = [{**g, **counted} for g in own.get("optimizer", own)["param_groups"]]
        if "optimizer" in own:
            state["optimizer"] = {**state.get("optimizer", {}), "param_groups": groups}
            state["param_state_sharding_type"] = _content()["distrib_optim_sharding_type"]
        else:
            state["param_groups"] = groups
        found[number] = state
    return found if len(members) > 1 else found[0]


def _hand_results_over_here() -> None:
    """megatron-core starts a server process (seconds, and an import of the main module) through which saves that go on
    in other processes hand back what they wrote. Ours end here, so that a queue of this process will do."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.SimpleQueue()


def _tree(chunks: list[Any], optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    from slimecli.trainers.megatron.weights import checkpoint_metadata

    # the optimizer's state is put together in host memory: a device may have no room for all float32 weights besides
    metadata = checkpoint_metadata() | {"distrib_optim_fully_reshardable_mem_efficient": True}
    tree = {
        name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in zip(_names(chunks), chunks, strict=True)
    }
    merged = {k: v for name in tree for k, v in tree[name].items()} if len(chunks) == 1 else tree
    tree["optimizer"] = optimizer.sharded_state_dict(merged, is_loading=is_loading, metadata=metadata)
    return tree


def _leave_out(state: Any) -> None:
    """Classes that parameter groups of an offloaded optimizer name, which only code could read back: at loading all
    groups are the loading optimizer's own. And that a rank has no parameters' state to give."""
    if isinstance(state, dict):
        for name in [k for k, v in state.items() if isinstance(v, type) or (k == "param_state" and v is None)]:
            del state[name]
    if isinstance(state, (dict, list)):
        for value in state.values() if isinstance(state, dict) else state:
            _leave_out(value)


def _names(chunks: list[Any]) -> list[str]:
    """Megatron-LM's names of the model's chunks in a checkpoint."""
    return ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]


def _content() -> dict[str, Any]:
    return {
        "non_homogeneous_layers": True,
        "singleton_local_shards": False,
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }


def _carried(spec: ModelSpec, model_dir: Path) -> dict[str, Any]:
    """What the model's folder has outside the language model, and of prediction layers, so that the way back to HF
    loses nothing."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from slimecli.trainers.megatron import prediction
    from slimecli.trainers.megatron.weights import carried

    folder = HfFolder(model_dir)
    outside = {name: ShardedTensor.from_rank_offsets(name, t) for name, t in carried(folder, spec)}
    return outside | prediction.in_checkpoint(folder, spec)


def _arguments(spec: ModelSpec) -> argparse.Namespace:
    """What Megatron-LM compares with its own arguments."""
    return argparse.Namespace(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        add_position_embedding=True,
        ckpt_format="torch_dist",
        no_save_rng=True,
    )


def _check_safe(iteration: Path) -> None:
    """megatron-core unpickles `.metadata` and `common.pt`: see first that they can do nothing but hold data."""
    TorchDist(iteration)
    common = iteration / "common.pt"
    if not common.is_file():
        raise DataError(f"{common} is missing", "resume from another checkpoint")
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            torch.load(common, weights_only=True, map_location="cpu")
        except Exception as error:
            raise DataError(f"{common} is damaged or holds code: {error}", "use a checkpoint you wrote") from None
