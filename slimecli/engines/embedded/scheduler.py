"""Continuous batching: waiting requests, slots, one decode step at a time. Runs on the engine's thread only."""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import torch

from slimecli.engines.embedded import prefill
from slimecli.engines.embedded.kv import WINDOW, round_up
from slimecli.engines.embedded.model import padded_rows
from slimecli.engines.embedded.reply import Ended, partial_reply, replies
from slimecli.engines.embedded.request import Request
from slimecli.engines.embedded.sampler import Sampler, top_tokens
from slimecli.engines.embedded.slot_model import SlotModel
from slimecli.engines.embedded.text import MASKS, TextCodec, first_stop


class Scheduler:
    """Slots of one model. Rows of every tensor are slots; rows without a request are computed and ignored."""

    def __init__(self, model: SlotModel, codec: TextCodec, slots: int, max_context: int) -> None:
        self.model = model
        self.codec = codec
        self.slots = slots
        self.max_context = max_context
        self.version = "0"
        self.admitting = True
        """False: requests that wait go on waiting, while those that run finish"""
        self.waiting: deque[Request] = deque()
        self.running: list[Request | None] = [None] * slots
        self.sampler = Sampler(slots, model.vocab, model.device)
        self.prefixes = prefill.Prefixes()
        rows, device = padded_rows(slots), model.device
        self._token = torch.zeros(rows, dtype=torch.int64, device=device)
        self._position = torch.zeros(rows, dtype=torch.int64, device=device)
        self._count = torch.zeros(slots, dtype=torch.int64, device=device)
        self._active = torch.zeros(slots, dtype=torch.int64, device=device)
        self._limit = torch.zeros(slots, dtype=torch.int64, device=device)
        self._stops = torch.full((slots, 1), -1, dtype=torch.int64, device=device)
        """[slots, S] tokens that end the answer, padded with -1"""
        self._mask_of = torch.zeros(slots, dtype=torch.int64, device=device)
        self._masks = torch.zeros(1, model.vocab, dtype=torch.bool, device=device)
        """[N, vocab] tokens that may complete a stop string; row 0 is for requests without any"""
        self._mask_ids: dict[tuple[str, ...], int] = {(): 0}
        self._said = torch.zeros(slots, WINDOW, dtype=torch.int64, device=device)
        self._log_probs = torch.zeros(slots, WINDOW, device=device)
        # the same numbers on the host, so that no step waits for the device to learn a length
        self._host_position = np.zeros(slots, dtype=np.int64)
        self._host_count = np.zeros(slots, dtype=np.int64)
        self._host_active = np.zeros(slots, dtype=np.int64)
        self._top = 0
        """one above the highest taken slot"""
        self._stream_rows: list[int] = []
        self._top_rows: list[int] = []
        self._string_stops = False
        self.steps = self.tokens = 0

    # -- what the engine asks ----------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True while a request waits or runs."""
        return bool(self.waiting) or self._top > 0

    @property
    def can_step(self) -> bool:
        """True while a step would do something."""
        return self._top > 0 or (self.admitting and bool(self.waiting))

    @property
    def active(self) -> int:
        """Requests in slots."""
        return int(self._host_active.sum())

    def submit(self, requests: list[Request]) -> None:
        """Queue requests, first come first served."""
        self.waiting.extend(requests)

    def step(self) -> None:
        """Fill free slots, then one token for every running request."""
        if self.waiting and self.admitting and self.active < self.slots:
            self._admit()
        if self._top:
            self._decode()

    def abort(self, rid: str | None = None) -> int:
        """End requests early, with what they have; `rid` names one (or all that n or a list made of it), None all."""

        def meant(request: Request) -> bool:
            return rid is None or rid in (request.rid, request.family)

        gone = [r for r in self.waiting if meant(r)]
        self.waiting = deque(r for r in self.waiting if not meant(r))
        for request in gone:
            ended = Ended(request, request.output, request.log_probs, _ABORT)
            request.finish(replies([ended], self.codec, self.version)[0])
        rows = [i for i, r in enumerate(self.running) if r is not None and meant(r)]
        self._finish(dict.fromkeys(rows, _ABORT))
        return len(gone) + len(rows)

    def retract(self) -> None:
        """Take every running request out of its slot; it continues later, its cache computed anew."""
        rows = [i for i, r in enumerate(self.running) if r is not None]
        for row, said, log_probs in self._read(rows):
            request = self.running[row]
            assert request is not None
            request.output, request.log_probs = said, log_probs
            request.retractions += 1
            self.waiting.appendleft(request)
        self.waiting = deque(sorted(self.waiting, key=lambda r: r.arrived))
        self._release(rows)

    def fail_all(self, error: Exception) -> None:
        """Answer everything with an error and start from empty slots."""
        requests = [*self.waiting, *(r for r in self.running if r is not None)]
        self.waiting.clear()
        self._release([i for i, r in enumerate(self.running) if r is not None])
        for request in requests:
            request.fail(error)

    def new_version(self, version: str) -> None:
        """Tokens said from now on come from these weights; no cache of older weights is shared any more."""
        self.version = version
        self.prefixes.clear()
        for row, request in enumerate(self.running):
            if request is not None:
                mark_version(request, version, int(self._host_count[row]))

    # -- admission ---------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        free = [i for i, r in enumerate(self.running) if r is None][: len(self.waiting)]
        placed = [(slot, self.waiting.popleft()) for slot in free]
        for slot, request in placed:
            self.running[slot] = request
            mark_version(request, self.version, len(request.output))
        prefill.fill(self.model, self.prefixes, placed)
        requests = [r for _, r in placed]
        self.sampler.place(free, [r.sampling for r in requests], [r.output for r in requests])
        index = torch.tensor(free, device=self.model.device)
        contexts = [r.context for r in requests]
        self._host_position[free] = [len(c) - 1 for c in contexts]
        self._host_count[free] = [len(r.output) for r in requests]
        self._host_active[free] = 1
        self._active[index] = 1
        self._token[index] = torch.tensor([c[-1] for c in contexts], device=self.model.device)
        self._position[index] = torch.from_numpy(self._host_position[free]).to(self.model.device)
        self._count[index] = torch.from_numpy(self._host_count[free]).to(self.model.device)
        limits = [r.sampling.max_new_tokens for r in requests]
        self._limit[index] = torch.tensor(limits, device=self.model.device)
        self._place_stops(index, requests)
        self._place_output(placed, max(limits))
        self._plan()
        self._finish({s: {"type": "length", "length": 0} for s, r in placed if r.sampling.max_new_tokens == 0})

    def _place_stops(self, index: torch.Tensor, requests: list[Request]) -> None:
        wide = max(len(r.sampling.stop_ids) for r in requests)
        if wide > self._stops.shape[1]:
            more = torch.full((self.slots, wide - self._stops.shape[1]), -1, dtype=torch.int64)
            self._stops = torch.cat([self._stops, more.to(self.model.device)], 1)
        if len(self._masks) > MASKS:
            self._forget_masks()
        width = self._stops.shape[1]
        table = [sorted(r.sampling.stop_ids) + [-1] * (width - len(r.sampling.stop_ids)) for r in requests]
        self._stops[index] = torch.tensor(table, dtype=torch.int64, device=self.model.device).view(-1, width)
        self._mask_of[index] = torch.tensor([self._mask_id(r.sampling.stop) for r in requests]).to(self.model.device)

    def _forget_masks(self) -> None:
        """Keep those of running answers alone: callers choose their stop strings, and every set takes memory here."""
        of = torch.where(self._active > 0, self._mask_of, 0)
        used = torch.tensor(sorted({0, *of.tolist()}), device=of.device)
        place = of.new_zeros(len(self._masks))
        place[used] = torch.arange(len(used), device=of.device)
        self._mask_of, self._masks = place[of], self._masks[used]
        places, kept = place.tolist(), set(used.tolist())
        self._mask_ids = {stops: places[i] for stops, i in self._mask_ids.items() if i in kept}

    def _mask_id(self, stops: tuple[str, ...]) -> int:
        if stops not in self._mask_ids:
            mask = self.codec.stop_mask(stops).to(self.model.device)
            self._mask_ids[stops] = len(self._masks)
            self._masks = torch.cat([self._masks, mask[None]])
        return self._mask_ids[stops]

    def _place_output(self, placed: list[tuple[int, Request]], limit: int) -> None:
        """Room for every answer; what was said before a retraction goes back in."""
        extra = round_up(limit, WINDOW) - self._said.shape[1]
        if extra > 0:
            self._said = torch.nn.functional.pad(self._said, (0, extra))
            self._log_probs = torch.nn.functional.pad(self._log_probs, (0, extra))
        for slot, request in placed:
            if count := len(request.output):
                self._said[slot, :count] = torch.tensor(request.output, device=self.model.device)
                self._log_probs[slot, :count] = torch.tensor(request.log_probs, device=self.model.device)

    # -- one step ----------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        n = self._top
        rows = padded_rows(n)
        window = round_up(int(self._host_position[:n].max()) + 1, self.model.window_step)
        logits = self.model.decode(self._token[:rows], self._position[:rows], n, window)
        tokens, log_probs, scaled, lse = self.sampler.sample(logits, self._count, self._host_count)
        self.sampler.record(tokens)
        tokens, log_probs, active = tokens[:n], log_probs[:n], self._active[:n]
        place = self._count[:n, None]
        self._said.scatter_(1, place, tokens[:, None])
        self._log_probs.scatter_(1, place, log_probs[:, None])
        self._token[:n] = tokens
        self._position[:n] += active
        self._count[:n] += active
        self._host_position[:n] += self._host_active[:n]
        self._host_count[:n] += self._host_active[:n]
        self.steps += 1
        self.tokens += self.active
        if self._top_rows:
            self._keep_top(scaled, lse)
        ended = (tokens[:, None] == self._stops[:n]).any(-1) | (self._count[:n] >= self._limit[:n])
        if self._string_stops:
            ended |= self._masks[self._mask_of[:n], tokens]
        ended &= active.bool()
        rows_ended = ended.nonzero()[:, 0].tolist()
        finished = self._reasons(rows_ended) if rows_ended else {}
        if self._stream_rows:
            self._stream(finished)
        self._finish(finished)

    def _reasons(self, rows: list[int]) -> dict[int, dict[str, object]]:
        """Why each of these rows ends; rows whose stop string is not there after all are left out."""
        found: dict[int, dict[str, object]] = {}
        for row, said, _ in self._read(rows):
            request = self.running[row]
            assert request is not None
            sampling = request.sampling
            if said[-1] in sampling.stop_ids:
                found[row] = {"type": "stop", "matched": said[-1]}
                continue
            if sampling.stop:
                text = self.codec.decode([said], sampling.skip_special_tokens)[0]
                if match := first_stop(text, sampling.stop):
                    found[row] = {"type": "stop", "matched": match[1]}
                    continue
            if len(said) >= sampling.max_new_tokens:
                found[row] = {"type": "length", "length": len(said)}
        return found

    def _keep_top(self, scaled: torch.Tensor, lse: torch.Tensor) -> None:
        for row in self._top_rows:
            request = self.running[row]
            if request is not None:
                request.top.extend(top_tokens(scaled, lse, [row], request.top_logprobs))

    def _stream(self, finished: dict[int, dict[str, object]]) -> None:
        """Hand out what there is so far; a finishing request answers through `finish`."""
        for row, said, log_probs in self._read([r for r in self._stream_rows if r not in finished]):
            request = self.running[row]
            if request is not None and request.on_tokens is not None:
                request.on_tokens(partial_reply(request, said, log_probs, self.codec, self.version))

    # -- slots -------------------------------------------------------------------------------------------------------

    def _read(self, rows: list[int]) -> list[tuple[int, list[int], list[float]]]:
        """(row, tokens, log-probs) of what these rows have said, in one transfer."""
        if not rows:
            return []
        counts = self._host_count[rows].tolist()
        longest = max(counts)
        said, log_probs = self._said[rows, :longest].tolist(), self._log_probs[rows, :longest].tolist()
        return [(r, s[:c], p[:c]) for r, s, p, c in zip(rows, said, log_probs, counts, strict=True)]

    def _finish(self, reasons: dict[int, dict[str, object]]) -> None:
        """Answer these rows and free their slots."""
        if not reasons:
            return
        ended = []
        for row, said, log_probs in self._read(list(reasons)):
            request = self.running[row]
            assert request is not None
            ended.append(Ended(request, said, log_probs, reasons[row]))
        self._release(list(reasons))
        for item, reply in zip(ended, replies(ended, self.codec, self.version), strict=True):
            item.request.finish(reply)

    def _release(self, rows: list[int]) -> None:
        if not rows:
            return
        for row in rows:
            self.running[row] = None
            self.sampler.release(row)
        self.prefixes.forget(rows)
        self._host_active[rows] = 0
        self._active[rows] = 0
        # an empty slot stays at position 0, so that it does not widen the window
        self._host_position[rows] = 0
        self._host_count[rows] = 0
        self._position[rows] = 0
        self._count[rows] = 0
        self._compact()
        self._plan()

    def _compact(self) -> None:
        """Move requests down when that saves rows of the matrix products and nobody waits for the holes."""
        self._top = max((i + 1 for i, r in enumerate(self.running) if r is not None), default=0)
        active = self.active
        if self.waiting or padded_rows(active) >= padded_rows(self._top):
            return
        holes = [i for i in range(active) if self.running[i] is None]
        sources = [i for i in range(active, self._top) if self.running[i] is not None]
        length = int(self._host_position[sources].max()) + 1
        self.model.cache.copy(sources, holes, length)
        self.sampler.move(sources, holes)
        self.prefixes.move(sources, holes)
        src, dst = torch.tensor(sources), torch.tensor(holes)
        for tensor in (
            self._token, self._position, self._count, self._active, self._limit, self._stops, self._mask_of,
            self._said, self._log_probs,
        ):  # fmt: skip
            tensor[dst] = tensor[src]
        for array in (self._host_position, self._host_count, self._host_active):
            array[holes] = array[sources]
        for source, hole in zip(sources, holes, strict=True):
            self.running[hole], self.running[source] = self.running[source], None
        for tensor in (self._active, self._position, self._count):
            tensor[src] = 0
        for array in (self._host_active, self._host_position, self._host_count):
            array[sources] = 0
        self._top = active

    def _plan(self) -> None:
        """Note which rows need work on the host every step."""
        taken = [(i, r) for i, r in enumerate(self.running) if r is not None]
        self._top = taken[-1][0] + 1 if taken else 0
        self._stream_rows = [i for i, r in taken if r.on_tokens is not None]
        self._top_rows = [i for i, r in taken if r.top_logprobs]
        self._string_stops = any(r.sampling.stop for _, r in taken)
        self.sampler.plan()


_ABORT: dict[str, object] = {"type": "abort", "message": "Abort in engine"}


def mark_version(request: Request, version: str, count: int) -> None:
    """From token `count` on, this version speaks."""
    if request.spans and request.spans[-1][0] == version:
        return
    if request.spans and request.spans[-1][1] == count:
        request.spans.pop()
    request.spans.append((version, count))


def stamp() -> float:
    """Arrival time."""
    return time.monotonic()
