"""A transformers causal LM as the trainer sees it: packed tokens in, log-probs of the trained ones out."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slimecli.batch import from_groups
from slimecli.errors import DataError, SlimeError
from slimecli.recipe import Recipe
from slimecli.trainers import _attention
from slimecli.trainers._log_probs import token_log_probs
from slimecli.trainers._norm import fuse_norms
from slimecli.trainers._packing import Packing, pack
from slimecli.types import Sample

AGREEMENT = 1e-3
"""largest difference (nats) between our packed log-probs and transformers' own, both in float32"""
ISOLATION = 1e-5
"""largest change (nats) that the tokens of one packed sample may make to another's log-probs"""


class HasDecoder(Protocol):
    """A module around a transformers model."""

    hf: Any


class PolicyModel(nn.Module):
    """The model, run on a Packing. Its parameters carry the prefix `hf.` in front of their HF names."""

    def __init__(self, hf: Any, chunk: int) -> None:
        super().__init__()
        self.hf = hf
        self._chunk = chunk

    def forward(self, packing: Packing, temperature: float) -> tuple[Tensor, Tensor]:
        """[P] log-probs and [P] entropies of the packing's predictions."""
        hidden = hidden_states(getattr(self.hf, self.hf.base_model_prefix), packing)
        head = self.hf.get_output_embeddings()
        rows = hidden.index_select(0, packing.rows)
        return token_log_probs(rows, head.weight, packing.targets, temperature=temperature, chunk=self._chunk)


def hidden_states(body: nn.Module, packing: Packing) -> Tensor:
    """[U, H] last hidden states of a decoder's nodes."""
    output = body(
        input_ids=packing.token_ids[None],
        position_ids=packing.position_ids[None],
        use_cache=False,
        layout=_attention.Layout(packing),
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def load_model(recipe: Recipe, model_dir: Path, *, publishes: bool = True) -> PolicyModel:
    """The HF folder as a float32 model on the CPU, checked: every weight is there, and packed log-probs are
    transformers' own.

    Args:
        publishes: its weights are to go to engines, under the names that the folder has them.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    _attention.register()
    hf, report = AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype=torch.float32,
        use_safetensors=True,
        trust_remote_code=recipe.model.trust_remote_code,
        output_loading_info=True,
    )
    lacking = sorted(report["missing_keys"]) + sorted(str(k) for k in report["mismatched_keys"])
    if lacking:
        raise DataError(
            f"{model_dir} lacks {len(lacking)} weight(s), e.g. {lacking[0]}", "download or export the model again"
        )
    # Nothing is padded here, and an answer may hold the padding token: its embedding is learnt like every other.
    hf.get_input_embeddings().padding_idx = None
    # Evaluation mode means no dropout, which would make policy and engine differ; gradients flow all the same.
    model = PolicyModel(hf, recipe.trainer.logits_chunk_tokens).eval()
    if publishes:
        _check_names(model, model_dir)
    truth = _own_log_probs(model)
    fuse_norms(model.hf)
    model.hf.set_attn_implementation(_attention.NAME)
    _check_log_probs(model, truth, model_dir)
    if recipe.trainer.activation_checkpointing:
        for layer in layers(model):
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    return model


def named_weights(model: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """(HF name, live tensor) in the model's order; a tied tensor once, under its first name."""
    seen: set[int] = set()
    for name, tensor in model.hf.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def layers(model: HasDecoder) -> list[nn.Module]:
    """The decoder layers: what is sharded and recomputed as a unit."""
    names = set(model.hf._no_split_modules or ())
    return [m for m in model.hf.modules() if type(m).__name__ in names]


def _check_names(model: PolicyModel, model_dir: Path) -> None:
    """What we publish must have the names of the files, or engines would not find it."""
    from safetensors import safe_open

    files = set()
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as handle:
            files |= set(handle.keys())
    foreign = sorted({name for name, _ in named_weights(model)} - files)
    if foreign:
        raise SlimeError(
            f"transformers names a weight {foreign[0]!r} that {model_dir} does not have under this name",
            "the fsdp trainer cannot publish this family; use trainer.backend = megatron",
        )


def _probe(model: PolicyModel, first: int = 1) -> list[list[int]]:
    """Token ids of two short samples; `first` changes the earlier one."""
    vocabulary = model.hf.get_output_embeddings().weight.shape[0]
    return [[i % vocabulary for i in ids] for ids in ([first, 2, 3, 4], [1, 2, 5, 6, 7])]


@torch.no_grad()
def _own_log_probs(model: PolicyModel) -> Tensor:
    """Log-probs of the probe by transformers alone, one sample at a time."""
    rows = []
    for ids in _probe(model):
        logits = model.hf(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        rows.append(logits.log_softmax(1)[:-1].gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1))
    return torch.cat(rows)


def _packed_log_probs(model: PolicyModel, samples: list[list[int]], *, share: bool = True) -> Tensor:
    group = [Sample(tokens=ids, response_length=len(ids) - 1) for ids in samples]
    packing = pack(from_groups([group], temperature=1.0), share=share)
    log_probs, _ = model(packing, 1.0)
    result: Tensor = log_probs[packing.predictions]
    return result


@torch.no_grad()
def _check_log_probs(model: PolicyModel, truth: Tensor, model_dir: Path) -> None:
    """The probe packed must give transformers' log-probs (not so where logits are scaled, capped or biased after the
    output embedding), and a sample must not feel its neighbour (as it does in recurrent layers)."""
    family, fix = model.hf.config.model_type, "use trainer.backend = megatron"
    try:
        ours = _packed_log_probs(model, _probe(model))
        beside = _packed_log_probs(model, _probe(model, first=8), share=False)
        alone = _packed_log_probs(model, _probe(model), share=False)
    except (KeyError, TypeError) as error:
        raise SlimeError(
            f"the fsdp trainer cannot train {family} ({model_dir}): its code passes no options on to attention", fix
        ) from error
    gap = float((ours - truth).abs().max())
    leak = float((alone - beside)[-4:].abs().max())
    if not leak < ISOLATION:
        raise SlimeError(
            f"the fsdp trainer cannot train {family} ({model_dir}): packed samples change each other ({leak:.2g} nats)",
            fix,
        )
    if not gap < AGREEMENT:
        raise SlimeError(
            f"the fsdp trainer cannot train {family} ({model_dir}): packed log-probs are {gap:.2g} nats off", fix
        )
