"""Several processes, one engine: process 0 schedules, samples and drafts; the others compute their part of the model.

    process 0      plan, draft, forward, verify, advance, settle
                        |  each forward's packed integers
    process 1..        forward, forward, forward, ...             (sharding.py: what a process holds, and the sums)

Before process 0 runs a program (graphs.py) it sends the others the program's number and the packed step, and all run
the same program; inside, each layer waits twice for the sum over all. Everything that decides anything happens in
process 0, so an engine over several processes gives the same ids. N-grams and a draft model of its own stay there too.

Process 0 starts the others itself, or torchrun starts all of them. A process that ends or hangs makes the next forward
raise WorkerLost. The others end when process 0 closes its LLM, and when it ends in any other way.

Knows: torch.distributed, processes. Does not know: requests, layers. Taught in notebook 02 (KV cache: two programs in
one).
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from minispec.config import ConfigError
from minispec.core import StepLayout
from minispec.graphs import Program
from minispec.models.sharding import Shard, WorkerLost

log = logging.getLogger(__name__)

TIMEOUT = timedelta(minutes=5)  # for one sum or message, and for all processes to come up
IDLE = timedelta(days=3650)  # an engine may wait so long for its next request
END_SECONDS = 30  # for the others to end on request; then they are killed
HOST = "127.0.0.1"


class Group:
    """This process among those that share a model. Raises ConfigError when they cannot be brought together.

    size: how many there are. options: the arguments of `LLM`, for the processes that this one starts.
    Under torchrun (RANK and WORLD_SIZE are set) nothing is started.
    """

    def __init__(self, size: int, options: Mapping[str, Any]) -> None:
        if dist.is_initialized():
            raise ConfigError("tensor_parallel_size: this process is in a group already; close its LLM first")
        self.workers: list[subprocess.Popen] = []
        rank, where = int(os.environ.get("RANK", 0)), "env://"
        if "RANK" not in os.environ:
            with socket.socket() as free:
                free.bind((HOST, 0))
                port = free.getsockname()[1]
            self.workers, where = [_start(i, size, port, options) for i in range(1, size)], f"tcp://{HOST}:{port}"
        elif int(os.environ["WORLD_SIZE"]) != size:
            raise ConfigError(f"tensor_parallel_size is {size}, but WORLD_SIZE is {os.environ['WORLD_SIZE']}")
        self.shard, self.local_rank = Shard(rank, size), int(os.environ.get("LOCAL_RANK", rank))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            dist.init_process_group(backend, init_method=where, rank=rank, world_size=size, timeout=TIMEOUT)
            # The others wait for a message as long as it takes; process 0 never waits long for one of them to take it.
            self._messages = dist.new_group(backend="gloo", timeout=IDLE if rank else TIMEOUT)
        except RuntimeError as error:
            self.close()
            raise ConfigError(f"tensor_parallel_size {size}: the processes do not come together: {error}") from error

    def device(self, device: torch.device) -> torch.device:
        """The device of this process, which has a GPU of its own where the LLM is to be on one."""
        if device.type == "cuda":
            device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(device)
        return device

    def least(self, number: int) -> int:
        """The smallest of all processes' numbers; waits for all of them."""
        numbers = torch.tensor([number])
        try:
            dist.all_reduce(numbers, dist.ReduceOp.MIN)
        except RuntimeError as error:
            raise WorkerLost(f"a process ended while it loaded its part of the model: {error}") from error
        return int(numbers)

    def share(self, programs: Sequence[Program], device: torch.device) -> None:
        """Let the others run what process 0 runs from now on; in them this returns by SystemExit, when all is done."""
        if self.shard.rank:
            self._follow(programs, device)
            self.close()
            sys.exit()
        for index, program in enumerate(programs):
            program.announce = partial(self._announce, index)

    def _announce(
        self,
        index: int,
        layout: StepLayout,
        table: np.ndarray,
        extra: Sequence[np.ndarray],
        known: torch.Tensor | None,
    ) -> None:
        history = table[layout.table_rows, : layout.kv_lens.max()]
        packed = replace(layout, table_rows=np.arange(len(history)))
        self._send((index, packed, history, extra, None if known is None else len(known)))
        if known is not None:
            dist.broadcast(known.contiguous(), 0)

    def _send(self, message: Any) -> None:
        try:
            dist.broadcast_object_list([message], 0, self._messages)
        except RuntimeError as error:
            raise WorkerLost(f"a process of this tensor-parallel group has ended: {error}") from error

    @torch.inference_mode()
    def _follow(self, programs: Sequence[Program], device: torch.device) -> None:
        """Run what process 0 runs, until it closes its group or ends."""
        while True:
            messages: list[Any] = [None]
            try:
                dist.broadcast_object_list(messages, 0, self._messages)
            except RuntimeError as error:
                log.info("process 0 has ended: %s", error)
                return
            if messages[0] is None:
                return
            index, layout, table, extra, count = messages[0]
            known = None if count is None else torch.empty(count, dtype=torch.int64, device=device)
            if known is not None:
                dist.broadcast(known, 0)
            programs[index](layout, table, *extra, known=known)

    def close(self) -> None:
        """Let the others end and leave the group."""
        if dist.is_initialized():
            if self.shard.rank == 0:
                with suppress(WorkerLost):
                    self._send(None)
            dist.destroy_process_group()
        for worker in self.workers:
            try:
                worker.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self.workers = []


def _start(rank: int, size: int, port: int, options: Mapping[str, Any]) -> subprocess.Popen:
    """A process that makes the same LLM. It has a session of its own: Ctrl-C is for process 0 alone."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": HOST, "MASTER_PORT": port}
    worker = subprocess.Popen(
        [sys.executable, "-m", "minispec.parallel_worker"],
        stdin=subprocess.PIPE,
        env=os.environ | {name: str(value) for name, value in place.items()},
        start_new_session=True,
    )
    worker.stdin.write(pickle.dumps(dict(options)))
    worker.stdin.close()
    return worker
