"""HF safetensors <-> Megatron torch_dist: streamed in pieces, re-read, certified, continued after an interruption."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slimecli import files
from slimecli.errors import DataError, UsageError
from slimecli.headers import HF_FILES, TRACKER, config_folder
from slimecli.model_specs import ModelSpec, from_config
from slimecli.weights.certificate import CERTIFICATE
from slimecli.weights.check import check_folder, spec_of
from slimecli.weights.conversion import Conversion, carrier_of, convert, kinds_of, word
from slimecli.weights.hf import HfFolder, copy_companions, read_config
from slimecli.weights.hf_write import HfPlan
from slimecli.weights.maps import embedding_of, objects_of, rules_of, stored_in
from slimecli.weights.maps.rule import Rule
from slimecli.weights.pieces import PIECE, FileSource, Source, source_of
from slimecli.weights.quant import Weights, open_weights
from slimecli.weights.quant_fp8 import quantizer_of
from slimecli.weights.quant_scheme import CONFIG_KEY, plain_config
from slimecli.weights.quantized import QuantizedSource
from slimecli.weights.torch_dist import TorchDist, TorchDistSource, find_iteration
from slimecli.weights.torch_dist_write import TorchDistPlan, zero_ranges

SHARD_BYTES = 5_000_000_000
"""largest shard of a result in safetensors"""


def hf_to_torch_dist(
    hf: Path,
    out: Path,
    *,
    expected: ModelSpec | None = None,
    dtype: torch.dtype | None = None,
    vocab_multiple: int = 128,
    verify: bool = True,
    jobs: int = 0,
) -> dict[str, Any]:
    """Write a Megatron release checkpoint.

    Args:
        hf: HF folder of a known family, quantised or not.
        out: what Megatron's --load takes; committed as a whole.
        expected: registry entry the folder must agree with.
        dtype: floating tensors are cast to it; None keeps each as it is.
        vocab_multiple: embedding rows are padded with zeros to a multiple of this, as Megatron does.
        verify: read everything back and compare before the folder appears.
        jobs: threads; 0: one more than there are cores, up to 8. The result does not depend on it.

    Returns the summary that DONE.json holds.
    """
    begin = time.perf_counter()
    spec = check_folder(hf, expected)
    folder = open_weights(hf)
    spec = spec if spec is not None else spec_of(folder)
    rules = rules_of(spec, spec.padded_vocab(vocab_multiple), folder.shapes)
    source = source_of(folder)
    try:
        _check_tied_head(source, folder, spec)
        kinds = kinds_of(source, rules, dtype)
        plan = TorchDistPlan(rules, kinds, objects_of(rules), "release")

        def finish(where: Path) -> None:
            plan.finish(where / "release", _common_args(spec, vocab_multiple))
            files.write_text(where / TRACKER, "release")
            (where / HF_FILES).mkdir(exist_ok=True)
            copy_companions(hf, where / HF_FILES, dtype=word(dtype))
            _drop_quantization(where / HF_FILES)

        def reopen(where: Path) -> Source:
            written = TorchDist(where, fresh=True)
            _check_layout(written, rules)
            return TorchDistSource(written, rules)

        options = {"to": "torch_dist", "dtype": word(dtype), "vocab_multiple": vocab_multiple}
        what = Conversion(hf, hf, out, spec, options, plan.packer, finish, reopen)
        return convert(what, carrier_of(source, kinds), begin, verify=verify, jobs=jobs)
    finally:
        source.close()


def torch_dist_to_hf(
    checkpoint: Path,
    out: Path,
    *,
    like: Path | None = None,
    expected: ModelSpec | None = None,
    dtype: torch.dtype | None = None,
    quantize: str = "",
    verify: bool = True,
    jobs: int = 0,
) -> dict[str, Any]:
    """Write an HF folder.

    Args:
        checkpoint: folder with the tracker file, or one iteration; any TP, PP, EP or stacking.
        like: HF folder with config and tokenizer; None: what slime put beside the checkpoint.
        expected: registry entry that the config must agree with.
        quantize: `fp8` or `fp8-ue8m0`: linear layers in blocks of 128x128; empty: none.
    """
    begin = time.perf_counter()
    like = like or find_companions(checkpoint)
    stored, spec, rules = open_checkpoint(checkpoint, like, expected)
    source: Source = TorchDistSource(stored, rules)
    names = [name for rule in rules for name in rule.hf]
    quantizer = quantizer_of(quantize)
    if quantizer is not None:
        quantized = QuantizedSource(source, names, quantizer)
        source, names, dtype = quantized, quantized.names, dtype or torch.bfloat16
    try:
        kinds = kinds_of(source, rules, dtype, names)
        plan = HfPlan({name: (kinds[name], source.shape(name)) for name in names}, SHARD_BYTES)

        def finish(where: Path) -> None:
            plan.finish(where)
            main = dtype or max(set(kinds.values()), key=list(kinds.values()).count)
            copy_companions(like, where, dtype=word(main))
            _drop_quantization(where)
            if quantizer is not None:
                quantizer.finish(where)

        def reopen(where: Path) -> Source:
            if quantizer is None:
                check_folder(where, expected)
            return FileSource(HfFolder(where), fresh=True)

        options = {"to": "hf", "dtype": word(dtype), "quantize": quantize, "shard": SHARD_BYTES}
        what = Conversion(stored.path, like, out, spec, options, plan.packer, finish, reopen)
        return convert(what, carrier_of(source, kinds), begin, verify=verify, jobs=jobs)
    finally:
        source.close()


def open_checkpoint(
    checkpoint: Path, like: Path, expected: ModelSpec | None = None
) -> tuple[TorchDist, ModelSpec, list[Rule]]:
    """A torch_dist checkpoint that holds the whole model which the config of `like` describes, and nothing else."""
    stored = TorchDist(checkpoint)
    config = read_config(like)
    if expected is not None and (differing := expected.check(config)):
        raise DataError(f"{like / 'config.json'} is not {expected.name}: {'; '.join(differing)}", "give another --hf")
    spec = from_config(config, name=like.name)
    rules = rules_of(spec, _stored_vocab(stored, spec), stored_in(stored.tensors, _hf_names(checkpoint)))
    _check_keys(stored, rules)
    return stored, spec, rules


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
    find_iteration(checkpoint)
    folder = config_folder(checkpoint)
    if folder == checkpoint:
        raise DataError(f"{checkpoint} came without a config.json", "name the HF folder of the model: --hf DIR")
    return folder


def _hf_names(checkpoint: Path) -> list[str]:
    """Tensors of the HF folder that a checkpoint was converted from, if it was."""
    path = next((p for p in (checkpoint / CERTIFICATE, checkpoint.parent / CERTIFICATE) if p.is_file()), None)
    if path is None:
        return []
    certificate = files.read_json(path)
    if not isinstance(certificate, dict) or not isinstance(certificate.get("weights"), dict):
        raise DataError(f"{path} is no certificate of slime", "copy the checkpoint again, or remove this file")
    return list(certificate["weights"])


def _drop_quantization(folder: Path) -> None:
    """The config of dequantised weights does not call them quantised."""
    config = files.read_json(folder / "config.json")
    if CONFIG_KEY in config:
        files.write_json(folder / "config.json", plain_config(config))


def _check_tied_head(source: Source, folder: Weights, spec: ModelSpec) -> None:
    """A tied model may be stored with its output layer, which must then be the embedding."""
    head, table = "lm_head.weight", embedding_of(spec, folder.shapes)
    if not spec.tied or head not in folder.entries or table not in folder.entries:
        return
    entries = folder.entries
    same = (entries[head].shape, entries[head].dtype) == (entries[table].shape, entries[table].dtype)
    size = entries[table].dtype.itemsize
    count, step = entries[table].nbytes // size, PIECE // size
    buffers = [bytearray(PIECE), bytearray(PIECE)]
    for low in range(0, count if same else 0, step):
        high = min(low + step, count)
        views = [memoryview(b)[: (high - low) * size] for b in buffers]
        for name, view in zip((head, table), views, strict=True):
            source.read_into(name, low, high, view)
        same = same and views[0] == views[1]
    if not same:
        raise DataError(
            f"{folder.path}: config.json says tied, but lm_head.weight differs from the embedding",
            'set "tie_word_embeddings": false in config.json if the output layer is its own',
        )


def _check_layout(written: TorchDist, rules: list[Rule]) -> None:
    """Shapes of a result just written, and zeros where it was padded."""
    for rule in rules:
        if written.shape(rule.key) != rule.full:
            found = list(written.shape(rule.key))
            raise DataError(f"verification: {rule.key} has shape {found}, not {list(rule.full)}", "report this")
        for low, high in zero_ranges(rule):
            size = written.dtype(rule.key).itemsize
            for start in range(low, high, PIECE // size):
                stop = min(high, start + PIECE // size)
                data = np.empty((stop - start) * size, np.uint8)
                written.read_into(rule.key, rule.offset, rule.chunk, (start, stop), data.data)
                if data.any():
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
