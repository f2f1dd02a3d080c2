"""Do source and result give the same log-probs? Asked of transformers, where the model is small enough to be built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slimecli import files
from slimecli.errors import DataError
from slimecli.weights.pieces import Source, octets
from slimecli.weights.pipeline import Carrier

LIMIT = 400_000_000
"""bytes of the largest model that is built for this: with transformers around it, it stays below 1 GiB of memory, as a
conversion without it does for models of any size"""
TOKENS = 32


def compare_logprobs(config_folder: Path, carrier: Carrier, result: Source) -> dict[str, Any]:
    """Build the model from the source's tensors and from the result's, and compare their log-probs on a fixed prompt.

    Args:
        config_folder: folder with config.json.
        result: the tensors that were read back.

    Returns {"prompt_tokens", "max_abs_diff"}, or {"skipped": why}. Raises DataError where bits that are the same give
    another result.
    """
    reason = _reason_not_to(config_folder, carrier)
    if reason:
        return {"skipped": reason}
    same = all(kind == carrier.source.dtype(name) for name, kind in carrier.kinds.items())
    before = _logprobs(config_folder, carrier.source, list(carrier.kinds))
    after = _logprobs(config_folder, result, list(carrier.kinds))
    if isinstance(before, str) or isinstance(after, str):
        return {"skipped": before if isinstance(before, str) else str(after)}
    difference = float((before - after).abs().max())
    if same and difference != 0.0:
        raise DataError(
            f"verification: log-probs of source and result differ by {difference:g}", "report this: the map is wrong"
        )
    return {"prompt_tokens": TOKENS, "max_abs_diff": difference}


def _reason_not_to(config_folder: Path, carrier: Carrier) -> str:
    """Why the models are not built; empty if they can be."""
    nbytes = sum(size * carrier.kinds[name].itemsize for name, size in carrier.sizes.items())
    if nbytes > LIMIT:
        return f"{nbytes / 1e9:.1f} GB of weights; only models of up to {LIMIT / 1e9:.1f} GB are built in memory"
    if any(kind.is_floating_point and kind.itemsize == 1 for kind in carrier.kinds.values()):
        return "the result is quantised"
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    name = _architecture(config_folder)
    kind = files.read_json(config_folder / "config.json").get("model_type", "")
    if kind not in CONFIG_MAPPING_NAMES or not hasattr(transformers, name):
        return f"transformers has no {name or 'class'} for {kind!r} but with code from the repository"
    return ""


def _architecture(config_folder: Path) -> str:
    """The class that config.json names."""
    named = files.read_json(config_folder / "config.json").get("architectures") or [""]
    return str(named[0])


def _logprobs(config_folder: Path, source: Source, names: list[str]) -> torch.Tensor | str:
    """[TOKENS, vocabulary] float32, or why there is none."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    config, kind = transformers.AutoConfig.from_pretrained(config_folder), _architecture(config_folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    state = {}
    for name in names:
        tensor = torch.empty(source.shape(name), dtype=source.dtype(name))
        source.read_into(name, 0, tensor.numel(), octets(tensor))
        state[name] = tensor
    kinds = [tensor.dtype for tensor in state.values()]
    model, notes = getattr(transformers, kind).from_pretrained(
        None, config=config, state_dict=state, dtype=max(set(kinds), key=kinds.count), output_loading_info=True
    )
    if notes["missing_keys"]:
        return f"transformers finds no value for {len(notes['missing_keys'])} tensors of its {kind}"
    vocab = model.get_input_embeddings().weight.shape[0]
    prompt = torch.arange(1, TOKENS + 1) * 7919 % vocab
    with torch.no_grad():
        logits = model.eval()(prompt[None], use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)
