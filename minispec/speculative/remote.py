"""A draft model in a process of its own: only tokens cross over.

    the engine's process                                   the draft process
    RemoteDrafter    ids that ended; per request: how      StandaloneDrafter over a pool of its own: slots, pages,
                     many drafts, newly committed tokens   radix tree, exact bits
                  -> --------------------------------- ->
                  <- --------------------------------- <-
                     drafts; q where they were drawn

The draft process keeps the committed tokens of each request, so a round costs a few bytes per token. It has its own
slots, and what happens to the target's does not concern it: a request that is preempted keeps its draft rows. When its
slots are short, it gives back those of requests that do not take part in the round; they stay in its radix tree until
their room is needed.

Drafts depend on the tokens, the parameters and the request's random numbers alone, so they are the same as in one
process. A fault of the draft model comes over as an error, and the guard treats it like any other. When the process
ends or hangs, every further round raises DraftProcessLost until the guard switches this drafter off. The process ends
when the engine's process closes it, or ends in any other way.

Knows: torch.distributed, what a drafter must be told. Does not know: how drafts are made or judged.
Taught in notebook 12 (speculation inside the engine).
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from minispec.config import ConfigError, SpeculativeConfig
from minispec.core import Request
from minispec.kv.pool import KVPool
from minispec.parallel import END_SECONDS, HOST, IDLE
from minispec.runner import ModelRunner
from minispec.speculative.drafter import Drafter, Proposal

TIMEOUT = timedelta(minutes=5)  # for the model to be loaded, and for a round


class DraftProcessLost(RuntimeError):
    """The other process has ended, or does not answer."""


class Link:
    """One end of a connection of two processes, rank 0 and rank 1. `sent`, `received`: bytes so far."""

    def __init__(self, store: dist.Store, rank: int, timeout: timedelta) -> None:
        # A group of its own, not torch's default one: an LLM may also share its target with other processes.
        self.group, self.other, self.timeout = dist.ProcessGroupGloo(store, rank, 2, timeout), 1 - rank, timeout
        self.sent = self.received = 0

    def send(self, message: Any) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        for part in (torch.tensor([len(data)]), data):
            self._wait(self.group.send, part)
            self.sent += part.nbytes

    def receive(self) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        self._wait(self.group.recv, size)
        data = torch.empty(int(size), dtype=torch.uint8)
        self._wait(self.group.recv, data)
        self.received += size.nbytes + data.nbytes
        return pickle.loads(data.numpy().tobytes())

    def _wait(self, operation: Callable[..., Any], part: torch.Tensor) -> None:
        try:
            operation([part], self.other, 0).wait(self.timeout)
        except RuntimeError as error:
            raise DraftProcessLost(f"the link of engine and draft process is broken: {error}") from error


class DraftProcess:
    """A process that loads the draft model `name`. Raises ConfigError when it cannot, or when it does not come up.

    bytes_per_slot, attentions: what it takes of the target's device, see `Prepared`.
    """

    def __init__(
        self,
        name: str,
        config: SpeculativeConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name, self.link = name, None
        store = dist.TCPStore(HOST, 0, 2, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "minispec.speculative.remote", str(store.port)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the engine's process alone
        )
        try:
            with self.popen.stdin as stdin:
                pickle.dump((name, replace(config, draft_process=False), tokenizer, dtype, device), stdin)
            self.link = Link(store, 0, TIMEOUT)
            refusal, self.bytes_per_slot, self.attentions = self.link.receive()
        except (RuntimeError, OSError) as error:
            self.close()
            raise self._failed(error) from error
        if refusal:
            self.close()
            raise ConfigError(refusal)

    def build(self, runner: ModelRunner, pool: KVPool) -> RemoteDrafter:
        """See `Prepared`. Raises ConfigError when memory is short there."""
        num_rows, max_len = pool.table.slots.shape
        sizes = {"num_slots": pool.num_slots, "page_size": pool.page_size, "num_rows": num_rows, "max_len": max_len}
        seen = {"vocab_size": runner.vocab_size, "num_text_tokens": runner.num_text_tokens}
        try:
            self.link.send((sizes | {"enable_radix_cache": pool.enable_radix_cache}, seen, runner.attention))
            name, weight_bytes = self.link.receive()
        except DraftProcessLost as error:
            raise self._failed(error) from error
        return RemoteDrafter(self, runner.device, name, weight_bytes)

    def _failed(self, error: Exception) -> ConfigError:
        return ConfigError(f"draft_model {self.name!r}: its process does not come up: {error}")

    def close(self) -> None:
        """End the process, by force if it does not end by itself. Closing twice is no error."""
        if self.link is None:
            self.popen.kill()
        else:
            with suppress(DraftProcessLost):
                self.link.send(None)
        try:
            self.popen.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


class RemoteDrafter:
    """The drafter of a draft process, as the engine sees it. bytes_sent, bytes_received: of all rounds so far."""

    forwards = bytes_read = rounds = 0

    def __init__(self, process: DraftProcess, device: torch.device, name: str, weight_bytes: int) -> None:
        self.process, self.target_device, self.name, self.weight_bytes = process, device, name, weight_bytes
        self.link = process.link
        self.link.sent = self.link.received = 0
        self._told: dict[str, int] = {}  # request id -> tokens that the process knows
        self._ended: deque[str] = deque()  # requests that it does not know to have ended

    def propose(self, requests: Sequence[Request], candidate_lengths: Sequence[int]) -> Proposal:
        """See `Drafter.propose`. Raises DraftProcessLost, or RuntimeError for what the draft model raised."""
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        rows = []
        for request, k in zip(requests, candidate_lengths, strict=True):
            told = self._told.get(request.id)
            first = (request.prompt, request.params, request.seed, request.eos_ids) if told is None else None
            rows.append((request.id, k, first, request.tokens[told or len(request.prompt) :]))
            self._told[request.id] = len(request.tokens)
        self.link.send((ended, rows))
        answer = self.link.receive()
        self.rounds += 1
        if isinstance(answer, str):
            raise RuntimeError(answer)
        tokens, q, parents, costs, self.forwards, self.bytes_read = answer
        for request, (forwards, read) in zip(requests, costs, strict=True):
            request.metrics.draft_forwards, request.metrics.draft_bytes = forwards, read
        q = [None if rows is None else torch.from_numpy(rows).to(self.target_device) for rows in q]
        return Proposal(tokens, q, parents)

    def release(self, request: Request) -> None:
        """The process hears of it with the next round."""
        if self._told.pop(request.id, None) is not None:
            self._ended.append(request.id)

    @property
    def bytes_sent(self) -> int:
        return self.link.sent

    @property
    def bytes_received(self) -> int:
        return self.link.received


class Mirror:
    """The requests as the draft process knows them. with_q: send what drafts were drawn from."""

    def __init__(self, drafter: Drafter, pool: KVPool, with_q: bool) -> None:
        self.drafter, self.pool, self.with_q = drafter, pool, with_q
        self.requests: dict[str, Request] = {}

    def answer(self, ended: Sequence[str], rows: Sequence[tuple[str, int, Any, list[int]]]) -> Any:
        """What `RemoteDrafter.propose` waits for: the columns of a proposal and what they cost, or an error's text."""
        for name in ended:
            self._give_back(self.requests.pop(name))
        for name, _, first, fresh in rows:
            if first:
                prompt, params, seed, eos_ids = first
                self.requests[name] = Request(name, prompt, params, seed, max_len=0, eos_ids=eos_ids)
            self.requests[name].tokens += fresh
        batch = [self.requests[name] for name, *_ in rows]
        lengths = [k if self._room(request, k, batch) else 0 for request, (_, k, *_) in zip(batch, rows, strict=True)]
        try:
            proposal = self.drafter.propose(batch, lengths)
            qs, parents = (column or [None] * len(batch) for column in (proposal.q, proposal.parents))
            qs = [q.cpu().numpy() if self.with_q and q is not None else None for q in qs]
            costs = [(request.metrics.draft_forwards, request.metrics.draft_bytes) for request in batch]
            return proposal.on_host(), qs, list(parents), costs, self.drafter.forwards, self.drafter.bytes_read
        except Exception as error:  # of any kind: the guard of the other process decides what becomes of it
            return f"in the draft process: {type(error).__name__}: {error}"

    def _room(self, request: Request, k: int, batch: Sequence[Request]) -> bool:
        """Slots for its tokens and k drafts, at the cost of requests that are not in the batch; False if in vain."""
        for last_try in (False, True):
            if request.table_row is None and self.pool.table.num_free_rows:
                self.pool.admit(request)
            if request.table_row is not None and self.pool.reserve(request, len(request.tokens) + k):
                return True
            if not last_try:
                for other in self.requests.values():
                    if other not in batch:
                        self._give_back(other)
        self._give_back(request)
        return False

    def _give_back(self, request: Request) -> None:
        """Its exact rows stay in the radix tree."""
        if request.table_row is not None:
            allocated = request.num_pages * self.pool.page_size
            request.kv_len = min(self.drafter.cursor(request), allocated)
            self.pool.release(request)


def main(port: int) -> None:
    """Load the draft model that stdin names, and draft until the other process is gone."""
    from minispec.speculative.build import model_drafter

    name, config, tokenizer, dtype, device = pickle.load(sys.stdin.buffer)
    link = Link(dist.TCPStore(HOST, port, 2, is_master=False, timeout=TIMEOUT), 1, IDLE)
    try:
        prepared = model_drafter(name, config, SimpleNamespace(tokenizer=tokenizer), dtype, device)
    except ValueError as error:  # ConfigError and ModelLoadError
        link.send((str(error), 0, 0))
        return
    link.send((None, prepared.bytes_per_slot, prepared.attentions))
    with suppress(DraftProcessLost):
        if (message := link.receive()) is None:
            return
        sizes, seen, attention = message
        pool = KVPool(**sizes)
        drafter = prepared.build(SimpleNamespace(**seen, device=device, attention=attention), pool)
        link.send((drafter.name, drafter.weight_bytes))
        mirror = Mirror(drafter, pool, with_q=config.verification == "rejection")
        while (message := link.receive()) is not None:
            link.send(mirror.answer(*message))


if __name__ == "__main__":
    main(int(sys.argv[1]))
