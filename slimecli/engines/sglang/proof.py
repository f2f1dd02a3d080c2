"""What an SGLang server holds, compared with what it was sent.

SGLang has no fingerprint of its own weights in Hugging Face names. Its `/weights_checker` hashes every parameter as it
lies in the model: query, key and value in one tensor, gate and up in one, the vocabulary padded, divided over
tensor-parallel ranks. The same hashes are computed here from the weights that were sent, arranged in the same way, and
compared name by name, on every rank. Tensors that are arranged in other ways (experts, quantised weights, compressed
attention) are counted as not compared; the dense Qwen and Llama families are compared whole.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from slimecli.engines.sglang.device_hash import device_hash
from slimecli.errors import SlimeError
from slimecli.weights.fingerprint import Fingerprint

VOCABULARY_STEP = 64
"""SGLang pads the vocabulary to a multiple of it"""
_FUSED = re.compile(r"(.+\.)(q|k|v|gate|up)_proj\.(weight|bias)")
_PARTNERS: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("q", "k", "v"), ("qkv_proj", ("q", "k", "v"))),
    **dict.fromkeys(("gate", "up"), ("gate_up_proj", ("gate", "up"))),
}
"""part of a fused tensor -> (its name, its parts in order)"""
_ROW_PARALLEL = re.compile(r"\.(o_proj|down_proj)\.weight$")
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_WHOLE = re.compile(r"norm\.(weight|bias)$|\.(o_proj|down_proj)\.bias$")
_DENSE = re.compile(
    r"model\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj\.(weight|bias)|mlp\.(gate|up|down)_proj\.(weight|bias)"
    r"|self_attn\.[qk]_norm\.weight|\w*norm\.weight)|model\.norm\.weight"
)


class Caller(Protocol):
    """What is needed of a client."""

    url: str

    async def call(self, method: str, path: str, payload: Mapping[str, Any] | None, doing: str) -> Any:
        """One HTTP call; the decoded JSON."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a server says of itself."""

    version: str
    """weight version"""
    dtype: str
    """of its parameters; `auto`: the model's"""
    device: str
    ranks: list[Mapping[str, str]]
    """[tensor-parallel ranks] parameter -> hash"""

    @property
    def arrangement(self) -> dict[str, Any]:
        """Arguments of Checksums that make the same of the same weights."""
        return {"dtype": self.dtype, "on_gpu": self.device == "cuda", "ranks": len(self.ranks)}


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The outcome of a comparison."""

    equal: int
    """parameters with the hash that was expected, over all ranks"""
    different: list[str]
    """parameters with another one"""
    not_compared: list[str] = field(default_factory=list)
    """parameters that slime cannot arrange as SGLang does"""


class Checksums:
    """Hashes of what SGLang makes of Hugging Face tensors. Fed tensor by tensor; only parts of fused ones are kept.

    Args:
        dtype: of the engine's parameters; empty or `auto`: as they come.
        on_gpu: hash as servers on GPUs do.
        ranks: tensor-parallel size of the engine.
    """

    def __init__(self, *, dtype: str = "", on_gpu: bool = False, ranks: int = 1) -> None:
        self._dtype = getattr(torch, dtype) if dtype not in ("", "auto") else None
        self._hash = device_hash if on_gpu else _sha256
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}
        self.ranks: list[dict[str, str]] = [{} for _ in range(ranks)]
        """[ranks] parameter -> 16 hexadecimal digits"""

    def update(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor under its Hugging Face name."""
        tensor = tensor.detach()
        if self._dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        match = _FUSED.fullmatch(name)
        if name in _VOCABULARY:
            self._add(name, _padded(tensor).chunk(len(self.ranks)))
        elif not _DENSE.fullmatch(name):
            return
        elif match:
            self._fuse(match, tensor)
        elif _ROW_PARALLEL.search(name):
            self._add(name, tensor.chunk(len(self.ranks), dim=1))
        elif _WHOLE.search(name):
            self._add(name, [tensor] * len(self.ranks))

    def _fuse(self, match: re.Match[str], tensor: torch.Tensor) -> None:
        prefix, part, kind = match.groups()
        fused, partners = _PARTNERS[part]
        name = f"{prefix}{fused}.{kind}"
        waiting = self._waiting.setdefault(name, {})
        waiting[part] = tensor
        if len(waiting) < len(partners):
            return
        parts = [self._waiting[name][p].chunk(len(self.ranks)) for p in partners]
        del self._waiting[name]
        if all(len(p) == len(self.ranks) for p in parts):
            self._add(name, [torch.cat(shares) for shares in zip(*parts, strict=True)])

    def _add(self, name: str, shares: Iterable[torch.Tensor]) -> None:
        for rank, share in zip(self.ranks, shares, strict=False):
            rank[name] = f"{self._hash(share):016x}"


def _padded(table: torch.Tensor) -> torch.Tensor:
    rows = -table.shape[0] % VOCABULARY_STEP
    return torch.cat([table, table.new_zeros(rows, *table.shape[1:])]) if rows else table


def _sha256(tensor: torch.Tensor) -> int:
    """What SGLang computes for a tensor on a CPU."""
    octets = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.sha256(octets.data).digest()[:8], "big")


def compare(held: Held, expected: Sequence[Mapping[str, str]]) -> Proof:
    """Every parameter of every rank with what it should be.

    Args:
        expected: [ranks] parameter -> hash, as Checksums.ranks has it.
    """
    equal, different, unknown = 0, [], []
    for number, (rank, wanted) in enumerate(zip(held.ranks, expected, strict=True)):
        where = f" of rank {number}" if len(held.ranks) > 1 else ""
        for name, value in rank.items():
            if name not in wanted:
                unknown.append(name + where)
            elif wanted[name] != value:
                different.append(name + where)
            else:
                equal += 1
        # a tied head is one parameter with the embedding
        missing = wanted.keys() - rank.keys() - {"lm_head.weight"}
        different += [f"{name}{where} (which it does not have)" for name in sorted(missing)]
    return Proof(equal=equal, different=different, not_compared=unknown)


async def ask(engine: Caller) -> Held:
    """The server's hashes and what is needed to compute them here."""
    info = await engine.call("GET", "/server_info", None, "describing itself")
    model = await engine.call("GET", "/model_info", None, "telling its weight version")
    answer = await engine.call("POST", "/weights_checker", {"action": "checksum"}, "hashing its weights")
    ranks = [rank["checksums"] for rank in answer["ranks"]]
    return Held(version=str(model["weight_version"]), dtype=info["dtype"], device=str(info["device"]), ranks=ranks)


async def prove(engine: Caller, pairs: Iterable[tuple[str, torch.Tensor]]) -> tuple[Held, str]:
    """Compare a server with tensors in Hugging Face names.

    Returns what the server says, and slime's fingerprint of the tensors: the server holds what has this fingerprint. So
    weights that were damaged on their way here are found by whoever knows the trainer's fingerprint, and a server that
    did not take them is found here.

    Raises SlimeError naming the parameters that differ.
    """
    held = await ask(engine)
    expected = Checksums(**held.arrangement)
    mark = Fingerprint()
    for name, tensor in pairs:
        mark.update(name, tensor)
        expected.update(name, tensor)
    check(engine.url, held, expected.ranks)
    return held, mark.hexdigest()


def check(url: str, held: Held, expected: Sequence[Mapping[str, str]]) -> Proof:
    """`compare`, and raise if something differs, or nothing could be compared."""
    proof = compare(held, expected)
    if proof.different:
        named = ", ".join(proof.different[:3]) + f" and {len(proof.different) - 3} more" * (len(proof.different) > 3)
        raise SlimeError(
            f"the engine at {url} does not hold what it was sent: {named} differ(s), {proof.equal} are equal",
            "restart the engine; its weights are not those of the trainer",
        )
    if not proof.equal:
        raise SlimeError(
            f"none of the {len(proof.not_compared)} parameters of the engine at {url} could be compared with what it "
            "was sent: slime does not know how SGLang arranges this model",
            'take engine.backend = "embedded" for it',
        )
    return proof
