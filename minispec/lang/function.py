"""Programs as functions: `@function`, and the ways to run one.

Knows: arguments, defaults of sampling, batches. Does not know: how a state computes, backends. Taught in notebook 13
(everything on).
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from minispec.config import ConfigError, SamplingParams, check_number
from minispec.lang.expressions import SAMPLING_NAMES, sampling_fields
from minispec.lang.program import Backend, ProgramState, Run

MAX_THREADS = 64  # of a batch: programs at once, each with a thread that mostly waits
_default_backend: Backend | None = None


def set_default_backend(backend: Backend | None) -> None:
    """Who runs programs that name no backend."""
    global _default_backend
    _default_backend = backend


class Function:
    """A program, made of a function whose first parameter is the state: `@function def ask(s, question): ...`

    Calling it runs it; called with a state it goes on in that state, as a plain function would.
    """

    def __init__(self, body: Callable[..., Any]) -> None:
        functools.update_wrapper(self, body)
        self._body, self._signature = body, inspect.signature(body)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inner = args and isinstance(args[0], ProgramState)
        return self._body(*args, **kwargs) if inner else self.run(*args, **kwargs)

    def run(self, *args: Any, stream: bool = False, backend: Backend | None = None, **kwargs: Any) -> ProgramState:
        """Run the program and return its state, with nothing left running.

        args, kwargs: the function's own. Fields of SamplingParams (or SGLang's names of them) that are no parameters of
        the function are the defaults of every gen in it. stream=True returns at once; read `text_iter`, and the rest
        waits. Raises what the function, a gen or a branch has raised first; what else was running is aborted then.
        """
        names = SAMPLING_NAMES & kwargs.keys() - self._signature.parameters.keys()
        state, start = self._prepare(args, kwargs, {name: kwargs.pop(name) for name in names}, backend)
        if stream:
            threading.Thread(target=state._run.execute, args=(start,), name="minispec-function").start()
        else:
            state._run.execute(start)
            state._run.check()
        return state

    def run_batch(
        self,
        batch: Sequence[Mapping[str, Any]],
        *,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        backend: Backend | None = None,
        **sampling: Any,
    ) -> list[ProgramState]:
        """Run the program once for each dictionary of arguments, many at a time; return the states in order.

        All arguments are checked before anything runs. The first error of any item is raised, and ends the others.
        """
        if isinstance(batch, Mapping | str) or not all(isinstance(kwargs, Mapping) for kwargs in batch):
            raise ConfigError(f"run_batch takes a list of dictionaries of arguments, got {batch!r:.80}")
        threads = MAX_THREADS if num_threads == "auto" else num_threads
        check_number("num_threads", threads, 1, integer=True)
        prepared = [self._prepare((), kwargs, sampling, backend) for kwargs in batch]
        from tqdm import tqdm

        with ThreadPoolExecutor(min(threads, len(prepared) or 1), "minispec-batch") as pool:
            try:
                runs = {pool.submit(state._run.execute, start): state._run for state, start in prepared}
                for future in tqdm(as_completed(runs), total=len(runs), disable=not progress_bar):
                    runs[future].check()
            except BaseException:  # Ctrl-C too
                for state, _ in prepared:
                    state.cancel()
                raise
        return [state for state, _ in prepared]

    def _prepare(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], sampling: Mapping[str, Any], backend: Backend | None
    ) -> tuple[ProgramState, Callable[[], Any]]:
        """A state, and what runs the body in it. Raises TypeError for wrong arguments, as a call would."""
        backend = backend or _default_backend
        if backend is None:
            raise ConfigError("no backend: call set_default_backend(Runtime()), or give backend=RuntimeEndpoint(url)")
        defaults = sampling_fields(sampling)
        SamplingParams(**defaults)
        state = ProgramState(Run(backend, defaults))
        self._signature.bind(state, *args, **kwargs)
        return state, functools.partial(self._body, state, *args, **kwargs)


function = Function
