"""HF safetensors <-> Megatron torch_dist: streamed, re-read, certified."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slimecli import __version__, files
from slimecli.errors import DataError, UsageError
from slimecli.model_specs import ModelSpec, from_config
from slimecli.weights.check import check_folder, spec_of
from slimecli.weights.fingerprint import tensor_hash
from slimecli.weights.hf import HfFolder, copy_companions, save_hf_folder
from slimecli.weights.maps import objects_of, rules_of, stored_in
from slimecli.weights.maps.rule import Rule
from slimecli.weights.torch_dist import TRACKER, TorchDist, TorchDistWriter

CERTIFICATE = "certificate.json"
HF_FILES = "hf"
"""folder beside the Megatron checkpoint with config and tokenizer, so that the way back needs nothing else"""


@dataclass
class _Ledger:
    """What was read: name -> hash, shape and dtype of each HF tensor as it must come back."""

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def note(self, name: str, tensor: torch.Tensor) -> None:
        if name in self.rows:
            raise DataError(f"tensor {name} came twice", "report this: the weight map is wrong")
        self.rows[name] = _row(tensor)

    def compare(self, name: str, tensor: torch.Tensor) -> None:
        found = _row(tensor)
        if found != self.rows[name]:
            raise DataError(
                f"verification: {name} was written as {self.rows[name]} and reads back as {found}",
                "the disk or its driver is at fault, or this is a bug: convert again and compare",
            )


def _row(tensor: torch.Tensor) -> dict[str, Any]:
    value = int(tensor_hash(tensor).item()) & (2**64 - 1)
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "hash": f"{value:016x}",
    }


def plan_rows(spec: ModelSpec, source: HfFolder | None = None, padded_vocab: int = 0) -> list[dict[str, Any]]:
    """The mapping table of a dry run."""
    return [
        {
            "hf": ", ".join(rule.hf),
            "megatron": rule.key,
            "offset": list(rule.offset),
            "shape": list(rule.chunk),
            "global": list(rule.full),
            "bytes": sum(source.entries[n].nbytes for n in rule.hf) if source else None,
        }
        for rule in rules_of(spec, padded_vocab)
    ]


def hf_to_torch_dist(
    hf: Path,
    out: Path,
    *,
    expected: ModelSpec | None = None,
    dtype: torch.dtype | None = None,
    vocab_multiple: int = 128,
    verify: bool = True,
) -> dict[str, Any]:
    """Write a Megatron release checkpoint.

    Args:
        hf: HF folder of a known family.
        out: what Megatron's --load takes; committed as a whole.
        expected: registry entry the folder must agree with.
        dtype: floating tensors are cast to it; None keeps each as it is.
        vocab_multiple: embedding rows are padded with zeros to a multiple of this, as Megatron does.
        verify: read everything back and compare before the folder appears.

    Returns the summary that DONE.json holds.
    """
    begin = time.perf_counter()
    spec = _known(check_folder(hf, expected), hf)
    source, ledger = HfFolder(hf), _Ledger()
    rules = rules_of(spec, spec.padded_vocab(vocab_multiple), source.shapes)
    _check_tied_head(source, spec)
    notes: dict[str, Any] = {}
    with files.committed_folder(out, notes) as folder:
        writer = TorchDistWriter(folder / "release")
        try:
            for rule in rules:
                chunk = rule.merge([_take(source, name, dtype, ledger) for name in rule.hf])
                writer.add(rule.key, chunk, rule.full, rule.offset)
            for key in objects_of(rules):
                writer.add_empty_object(key)
            writer.finish(_common_args(spec, vocab_multiple))
        finally:
            writer.abandon()
        files.write_text(folder / TRACKER, "release")
        (folder / HF_FILES).mkdir()
        copy_companions(hf, folder / HF_FILES, dtype=str(dtype).removeprefix("torch.") if dtype else None)
        if verify:
            written = TorchDist(folder)
            for rule in rules:
                _verify_rule(written, rule, ledger)
        notes |= _certify(folder, ledger, spec, verified=verify, source=str(hf), to="torch_dist")
        notes["seconds"] = round(time.perf_counter() - begin, 3)
    return notes


def torch_dist_to_hf(
    checkpoint: Path,
    out: Path,
    *,
    like: Path | None = None,
    expected: ModelSpec | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    verify: bool = True,
) -> dict[str, Any]:
    """Write an HF folder.

    Args:
        checkpoint: folder with the tracker file, or one iteration; any TP, PP or stacking.
        like: HF folder with config and tokenizer; None: what slime put beside the checkpoint.
        expected: registry entry that the config must agree with.
    """
    begin = time.perf_counter()
    source = TorchDist(checkpoint)
    like = like or find_companions(checkpoint)
    config = files.read_json(like / "config.json")
    if expected is not None and (differing := expected.check(config)):
        raise DataError(f"{like / 'config.json'} is not {expected.name}: {'; '.join(differing)}", "give another --hf")
    spec, ledger = from_config(config, name=like.name), _Ledger()
    rules = rules_of(spec, _stored_vocab(source, spec), stored_in(source.tensors, _hf_names(checkpoint)))
    _check_keys(source, rules)
    notes: dict[str, Any] = {}

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for rule in rules:
            parts = rule.split(source.read(rule.key, rule.offset, rule.chunk))
            for name, part in zip(rule.hf, parts, strict=True):
                tensor = _cast(part, dtype)
                _refuse_nan(name, tensor)
                ledger.note(name, tensor)
                yield name, tensor

    with files.committed_folder(out, notes) as folder:
        save_hf_folder(pairs(), folder, like=like, dtype=dtype, max_shard_bytes=max_shard_bytes)
        if verify:
            check_folder(folder, expected)
            for name, tensor in HfFolder(folder).iterate():
                ledger.compare(name, tensor)
        notes |= _certify(folder, ledger, spec, verified=verify, source=str(checkpoint), to="hf")
        notes["seconds"] = round(time.perf_counter() - begin, 3)
    return notes


def torch_dtype(name: str) -> torch.dtype | None:
    """Floating dtype by name; None for an empty one."""
    if not name:
        return None
    if name not in ("float32", "bfloat16", "float16"):
        raise UsageError(f"dtype {name!r} is not known", "say float32, bfloat16 or float16")
    found: torch.dtype = getattr(torch, name)
    return found


def find_companions(checkpoint: Path) -> Path:
    """Config and tokenizer that hf_to_torch_dist left beside the checkpoint."""
    for folder in (checkpoint / HF_FILES, checkpoint.parent / HF_FILES):
        if (folder / "config.json").is_file():
            return folder
    raise DataError(f"{checkpoint} came without a config.json", "name the HF folder of the model: --hf DIR")


def _hf_names(checkpoint: Path) -> list[str]:
    """Tensors of the HF folder that a checkpoint was converted from, if it was."""
    path = next((p for p in (checkpoint / CERTIFICATE, checkpoint.parent / CERTIFICATE) if p.is_file()), None)
    return list(files.read_json(path)["weights"]) if path else []


def _known(spec: ModelSpec | None, hf: Path) -> ModelSpec:
    return spec if spec is not None else spec_of(HfFolder(hf))


def _take(source: HfFolder, name: str, dtype: torch.dtype | None, ledger: _Ledger) -> torch.Tensor:
    tensor = _cast(source.read(name), dtype)
    _refuse_nan(name, tensor)
    ledger.note(name, tensor)
    return tensor


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _refuse_nan(name: str, tensor: torch.Tensor) -> None:
    """The sum is the quick look: it is finite unless something is wrong or the values are huge."""
    if tensor.is_floating_point() and not torch.isfinite(tensor.sum(dtype=torch.float32)):
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise DataError(f"{name} holds {bad} NaN or infinite value(s)", "these weights are broken: get them again")


def _check_tied_head(source: HfFolder, spec: ModelSpec) -> None:
    """A tied model may be stored with its output layer, which must then be the embedding."""
    if spec.tied and "lm_head.weight" in source.entries:
        head, table = source.read("lm_head.weight"), source.read("model.embed_tokens.weight")
        if head.shape != table.shape or not torch.equal(head, table):
            raise DataError(
                f"{source.path}: config.json says tied, but lm_head.weight differs from the embedding",
                'set "tie_word_embeddings": false in config.json if the output layer is its own',
            )


def _verify_rule(written: TorchDist, rule: Rule, ledger: _Ledger) -> None:
    if written.shape(rule.key) != rule.full:
        raise DataError(f"verification: {rule.key} has shape {written.shape(rule.key)}, not {rule.full}", "report this")
    chunk = written.read(rule.key, rule.offset, rule.chunk)
    parts = rule.split(chunk)
    for name, part in zip(rule.hf, parts, strict=True):
        ledger.compare(name, part)
    padding = chunk[parts[0].shape[0] :] if len(parts) == 1 else chunk[:0]
    if padding.any():
        raise DataError(f"verification: padding rows of {rule.key} are not zero", "report this")


def _stored_vocab(source: TorchDist, spec: ModelSpec) -> int:
    rows = source.shape("embedding.word_embeddings.weight")[0]
    if rows < spec.vocab:
        raise DataError(
            f"{source.path} has {rows} embedding rows, config.json wants {spec.vocab}", "give the model's own --hf DIR"
        )
    return rows


def _check_keys(source: TorchDist, rules: list[Rule]) -> None:
    """Every tensor wanted is there in its shape, and no other weight is."""
    problems, used = [], set()
    for rule in rules:
        try:
            used.add(source.locate(rule.key)[0])
        except DataError:
            problems.append(f"missing {rule.key}")
            continue
        if source.shape(rule.key) != rule.full:
            problems.append(f"{rule.key} has shape {list(source.shape(rule.key))}, expected {list(rule.full)}")
    problems += [f"unknown {key}" for key in source.tensors if key not in used]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise DataError(f"{source.path}: {'; '.join(problems[:8])}{more}", "is --hf the folder of this model?")


def _common_args(spec: ModelSpec, vocab_multiple: int) -> dict[str, Any]:
    """What Megatron compares with its own arguments when it loads, and tools read back."""
    return {
        **{k.replace("-", "_"): v for k, v in spec.megatron_args().items()},
        "untie_embeddings_and_output_weights": not spec.tied,
        "add_position_embedding": True,
        "padded_vocab_size": spec.padded_vocab(vocab_multiple),
        "make_vocab_size_divisible_by": vocab_multiple,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "no_save_optim": True,
        "no_save_rng": True,
        "ckpt_format": "torch_dist",
    }


def _certify(folder: Path, ledger: _Ledger, spec: ModelSpec, *, verified: bool, source: str, to: str) -> dict[str, Any]:
    """Write certificate.json; returns its head, which goes into DONE.json."""
    head = {
        "to": to,
        "source": source,
        "family": spec.family.model_type,
        "params": spec.params,
        "tensors": len(ledger.rows),
        "verified": verified,
        "slime": __version__,
        "torch": importlib.metadata.version("torch"),
    }
    files.write_json(folder / CERTIFICATE, {**head, "weights": ledger.rows})
    return head
