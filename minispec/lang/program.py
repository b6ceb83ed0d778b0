"""A program while it runs: its text so far, what the model was asked for, its branches.

A state is a list of parts. Adding text only appends it. Adding a `gen` or a `select` appends a `Variable` whose text
comes later, and returns at once; a thread of the state computes its variables one after the other. Only reading waits
(`s["name"]`, `s.text()`). So the branches of a fork are asked for together and share the backend's forwards, and as
their texts begin alike they share its radix cache.

    s     "Q: ..." | gen a |                          parts; `a` may still be running
    fork  the same parts   | "in short:" | gen b      a copy of the list, not of the texts
          the same parts   | "at length:"| gen c

All states of one run have one `Run`: the first error anywhere ends everything, and whoever waits gets that error.

A program is plain text or a conversation. A conversation is rendered by the model's own template as a whole, whenever
the model is asked, so every template works; an open turn of the assistant continues after the template's opening.

Knows: parts, turns, threads, errors. Does not know: who computes (backends.py), models, tokens. Taught in notebook 13
(everything on).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from statistics import fmean
from typing import Any, Protocol

from tqdm import tqdm

from minispec.config import ConfigError, SamplingParams, check_number
from minispec.lang.expressions import SAMPLING_NAMES, Expression, Gen, Part, Turn, parts_of, sampling_fields

Dicts = Sequence[Mapping[str, Any]]  # messages of a conversation, or the arguments of a batch
MAX_THREADS = 64  # of a batch: programs at once, each with a thread that mostly waits
START, BETWEEN, NO_TURNS = "", "between turns", "text without turns"  # where a program is outside of a turn
END = "\ue000"  # a private character: where an unfinished turn is cut off again


class Cancelled(RuntimeError):
    """The run was ended by `ProgramState.cancel`."""


class Backend(Protocol):
    """Who runs a model. Calls come from many threads and may block. They raise what the caller shall see.

    `job.emit(piece)` shows what is written; `job.on_cancel(callback)` says how the call is ended early.
    """

    def render(self, messages: Dicts, *, add_generation_prompt: bool) -> str:
        """The conversation in the form of the model's chat template."""

    def generate(self, text: str, params: SamplingParams, job: Variable) -> tuple[str, dict[str, Any]]:
        """Continue the text: what was written, and the counts of it (`meta_info` in SGLang's form)."""

    def score(self, text: str, choices: Sequence[str], job: Variable) -> list[list[float]]:
        """Log-probabilities of the tokens of each choice behind the text, cut as `minispec.lang.choices` says."""


class Run:
    """What the states of one run share. `changed` guards and announces everything that threads tell each other."""

    def __init__(self, backend: Backend, sampling: Mapping[str, Any]) -> None:
        self.backend, self.sampling = backend, sampling
        self.changed = threading.Condition()
        self.error: BaseException | None = None
        self.ended = False  # the function has returned and nothing runs
        self.threads: list[ThreadPoolExecutor] = []  # one for each state, each of one thread
        self._callbacks: list[Callable[[], Any]] = []  # end what the backend works on, or did

    def execute(self, function: Callable[[], Any]) -> None:
        """Run the body of the program and wait for all that it has asked for. `check` says how it went."""
        try:
            self.check()
            function()
            self._join()
        except BaseException as error:  # Ctrl-C too
            self.fail(error)
            self._join()
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def _join(self) -> None:
        for thread in self.threads:
            thread.shutdown()

    def wait(self, ready: Callable[[], Any]) -> None:
        """Return when ready() is true; raise the run's error if that comes first."""
        with self.changed:
            self.changed.wait_for(lambda: ready() or self.error)
        if not ready():
            self.check()

    def check(self) -> None:
        """Raise the run's error if there is one."""
        if self.error:
            raise self.error

    def fail(self, error: BaseException) -> None:
        """End everything. Only the first error counts; those that follow from it say nothing."""
        with self.changed:
            if self.error or self.ended:
                return
            self.error = error
            self.changed.notify_all()
        for callback in [*self._callbacks]:
            with contextlib.suppress(Exception):  # there may be nothing left to end
                callback()

    def on_fail(self, callback: Callable[[], Any]) -> None:
        """Call this, from any thread, when the run fails; at once if it has."""
        with self.changed:
            self._callbacks.append(callback)
        if self.error:
            callback()


class Variable:
    """What one gen or select becomes: `value`, and `meta`, what the backend says of it."""

    def __init__(self, run: Run, asked: Gen) -> None:
        self._run, self._asked, self.on_cancel = run, asked, run.on_fail
        self._params = SamplingParams(**{**run.sampling, **asked.sampling})
        self._pieces: list[str] = []
        self.value: str | None = None
        self.meta: dict[str, Any] = {}

    def result(self) -> str:
        """Wait for the text. Raises the error of the run."""
        self._run.wait(lambda: self.value is not None)
        return self.value

    def stream(self) -> Iterator[str]:
        """The text, as it comes; what was shown before the call is there at once."""
        for place in itertools.count():
            self._run.wait(lambda n=place: len(self._pieces) > n or self.value is not None)
            if place == len(self._pieces):
                break
            yield self._pieces[place]
        yield self.value[sum(map(len, self._pieces)) :]

    def emit(self, piece: str) -> None:
        """Show a piece of the text."""
        with self._run.changed:
            self._pieces.append(piece)
            self._run.changed.notify_all()

    def compute(self, parts: Sequence[str | Turn | Variable], place: int) -> None:
        """Ask the backend, in the calling thread, for what follows parts[:place]. An error is the run's."""
        backend, asked = self._run.backend, self._asked
        try:
            text = text_of(parts[:place], backend)
            if asked.choices:
                choices = list(dict.fromkeys(asked.choices))  # each once
                logprobs = backend.score(text, choices, self)
                value, means = choices[asked.method(logprobs)], [fmean(values) for values in logprobs]
                meta = {"choices": choices, "normalized_prompt_logprobs": means, "input_token_logprobs": logprobs}
            else:
                value, meta = backend.generate(text, self._params, self)
            with self._run.changed:
                self.meta, self.value = meta, value
                self._run.changed.notify_all()
        except BaseException as error:
            self._run.fail(error)


def transcript(parts: Sequence[str | Turn | Variable]) -> tuple[list[dict[str, str]], str | None, str]:
    """Finished turns, the role of the open one (None: no turn is open), and its text. Waits for the variables."""
    messages, role, content = [], None, ""
    for part in parts:
        if not isinstance(part, Turn):
            content += part if isinstance(part, str) else part.result()
            continue
        if not part.begins:
            messages.append({"role": part.role, "content": content})
        role, content = (part.role if part.begins else None), ""
    return messages, role, content


def text_of(parts: Sequence[str | Turn | Variable], backend: Backend) -> str:
    """The parts as the model reads them."""
    messages, role, content = transcript(parts)
    if role == "assistant" and messages:
        return backend.render(messages, add_generation_prompt=True) + content
    if role is None:
        return backend.render(messages, add_generation_prompt=False) if messages else content
    messages.append({"role": role, "content": content + END})
    text, found, _ = backend.render(messages, add_generation_prompt=False).partition(END)
    if not found:
        raise ConfigError(f"the model's chat template does not show an unfinished turn of the {role}")
    return text


class ProgramState:
    """The `s` of a program. Belongs to the function's thread; reading may be anybody's.

    s += text, gen(...), select(...), user(...), ...     s["name"] and s.get_meta_info("name") wait for the variable
    """

    def __init__(self, run: Run, parent: ProgramState | None = None) -> None:
        self._run = run
        self._parts: list[str | Turn | Variable] = [*parent._parts] if parent else []
        # A Variable, or a list of what the branches had.
        self._variables: dict[str, Any] = {**parent._variables} if parent else {}
        self._role = parent._role if parent else START  # whose turn is open, or where else this is
        self._thread = ThreadPoolExecutor(1, "minispec-program")  # starts with the first variable
        run.threads.append(self._thread)

    # Writing ---------------------------------------------------------------------------------------------------

    def __iadd__(self, value: str | Expression) -> ProgramState:
        """Append. Raises ConfigError for what no program can hold, or the error of the run if it has failed."""
        for part in parts_of(value):
            self._append(part)
        return self

    def _append(self, part: Part) -> None:
        self._run.check()
        if self._run.ended:
            raise ConfigError("this run has ended: its state can be read, not continued")
        if isinstance(part, Turn):
            fits = self._role in (START, BETWEEN) if part.begins else self._role == part.role
            role = part.role if part.begins else BETWEEN
        else:
            fits, role = self._role != BETWEEN, self._role or NO_TURNS
        if not fits:
            raise ConfigError(f"{part!r:.80} cannot stand here: turns do not overlap, and no text is outside of them")
        self._role = role
        added = Variable(self._run, part) if isinstance(part, Gen) else part
        with self._run.changed:
            self._parts.append(added)
            if isinstance(part, Gen) and part.name is not None:
                self._variables[part.name] = added
            self._run.changed.notify_all()
        if isinstance(part, Gen):
            self._thread.submit(added.compute, self._parts, len(self._parts) - 1)

    @contextlib.contextmanager
    def _block(self, role: str) -> Iterator[None]:
        self._append(Turn(role, True))
        yield
        self._append(Turn(role, False))

    def _turn(self, role: str, content: str | Expression | None = None) -> AbstractContextManager[None]:
        block = self._block(role)
        if content is not None:
            with block:
                self += content
        return block

    # with s.user(): s += ...          or s.user(...) for a whole turn
    system = functools.partialmethod(_turn, "system")
    user = functools.partialmethod(_turn, "user")
    assistant = functools.partialmethod(_turn, "assistant")

    def fork(self, size: int = 1) -> Forks:
        """`size` branches that begin with this text and these variables. Waits for nothing."""
        check_number("the size of a fork", size, 1, integer=True)
        return Forks(self, [ProgramState(self._run, self) for _ in range(size)])

    def cancel(self) -> None:
        """End the run: what is running is aborted, and whoever waits gets Cancelled. Nothing happens after its end."""
        self._run.fail(Cancelled("the run was cancelled"))

    # Reading ---------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        """The text of a variable, or after `join` the list of the branches' texts. Waits. Raises KeyError."""
        return _read(self._variables[name], "value")

    def __contains__(self, name: str) -> bool:
        return name in self._variables

    def get_meta_info(self, name: str) -> Any:
        """What the backend says of a variable. Waits. Raises KeyError.

        Of a gen: counts (prompt_tokens, completion_tokens, cached_tokens, finish_reason, ...). Of a select: choices,
        log-probabilities of their tokens (input_token_logprobs) and the means of these (normalized_prompt_logprobs).
        """
        return _read(self._variables[name], "meta")

    def text(self) -> str:
        """All of it, as the model reads it: with the marks of the chat template if it is a conversation. Waits."""
        return text_of([*self._parts], self._run.backend)

    def messages(self) -> list[dict[str, str]]:
        """The finished turns, [{"role": ..., "content": ...}, ...]. Waits."""
        return transcript([*self._parts])[0]

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The text of one variable, or all text, in pieces as they come (`run(stream=True)` returns at once).

        All text begins with the prompt, in the marks of the chat template if it is a conversation; with a name there is
        only what the model writes.
        Pieces of all text add up to `text()`, unless the chat template writes a finished turn another way than it
        was generated. Raises the error of the run where it happened.
        """
        if var_name is not None:
            self._run.wait(lambda: var_name in self._variables or self._run.ended)
            yield from self._variables[var_name].stream()
            return
        shown = ""
        for place in itertools.count():
            self._run.wait(lambda n=place: n < len(self._parts) or self._run.ended)
            if place == len(self._parts):
                break
            if isinstance(part := self._parts[place], Variable):
                text = text_of(self._parts[:place], self._run.backend)
                yield text[len(shown) :]
                yield from part.stream()
                shown = text + part.result()
        yield self.text()[len(shown) :]


class Forks(list[ProgramState]):
    """The branches of a fork: a list, with `forks += ...` for all of them, and `join()`."""

    def __init__(self, parent: ProgramState, branches: list[ProgramState]) -> None:
        super().__init__(branches)
        self._parent = parent

    def __iadd__(self, value: Any) -> Forks:
        """Add to all branches: the same to each, a list with one for each, or a function of the branch's number."""
        each = value if isinstance(value, list) else [value(i) if callable(value) else value for i in range(len(self))]
        if len(each) != len(self):
            raise ConfigError(f"{len(each)} values for {len(self)} branches")
        for branch, its in zip(self, each, strict=True):
            branch += its
        return self

    def join(self) -> None:
        """Wait for what the branches have named; parent[name] is then the list of it, in their order."""
        gathered: dict[str, list[Any]] = {}
        for branch in self:
            for name, variable in branch._variables.items():
                if self._parent._variables.get(name) is not variable:
                    gathered.setdefault(name, []).append(variable)
        _read([*gathered.values()], "value")
        self._parent._variables.update(gathered)


def _read(value: Any, attribute: str) -> Any:
    """An attribute of a Variable once it is computed, or a list of them for a list."""
    if isinstance(value, list):
        return [_read(item, attribute) for item in value]
    value.result()
    return getattr(value, attribute)


def set_default_backend(backend: Backend | None) -> None:
    """Who runs programs that name no backend."""
    Function.default_backend = backend


class Function:
    """A program, made of a function whose first parameter is the state: `@function def ask(s, question): ...`

    Calling it runs it; called with a state it goes on in that state, as a plain function would.
    """

    default_backend: Backend | None = None

    def __init__(self, body: Callable[..., Any]) -> None:
        functools.update_wrapper(self, body)
        self._body, self._signature = body, inspect.signature(body)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inner = args and isinstance(args[0], ProgramState)
        return self._body(*args, **kwargs) if inner else self.run(*args, **kwargs)

    def run(self, *args: Any, stream: bool = False, **kwargs: Any) -> ProgramState:
        """Run the program and return its state, with nothing left running.

        args, kwargs: the function's own. Fields of SamplingParams (or SGLang's names of them) that are no parameters of
        the function are the defaults of every gen in it; `backend` is another one than the default. Raises what the
        function, a gen or a branch has raised first; what else was running is aborted then.

        stream=True returns at once and raises nothing: `text_iter` does. s[name] is there when the function has come to
        that gen, which the first piece of `text_iter(name)` shows.
        """
        names = (SAMPLING_NAMES | {"backend"}) & kwargs.keys() - self._signature.parameters.keys()
        state, start = self._prepare(args, kwargs, **{name: kwargs.pop(name) for name in names})
        if stream:
            threading.Thread(target=state._run.execute, args=(start,), name="minispec-function").start()
        else:
            state._run.execute(start)
            state._run.check()
        return state

    def run_batch(
        self, batch: Dicts, *, num_threads: int | str = "auto", progress_bar: bool = False, **options: Any
    ) -> list[ProgramState]:
        """Run the program once for each dictionary of arguments, many at a time; return the states in order.

        options: `backend`, and sampling fields for every gen. All arguments are checked before anything runs. The first
        error of any item is raised, and ends the others.
        """
        threads = MAX_THREADS if num_threads == "auto" else num_threads
        check_number("num_threads", threads, 1, integer=True)
        prepared = [self._prepare((), kwargs, **options) for kwargs in batch]
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

    def _prepare(self, args: Any, kwargs: Any, backend: Backend | None = None, **sampling: Any) -> tuple[Any, Any]:
        """A state, and what runs the body in it. Raises TypeError for wrong arguments, as a call would."""
        backend = backend or self.default_backend
        if backend is None:
            raise ConfigError("no backend: call set_default_backend(Runtime()), or give backend=RuntimeEndpoint(url)")
        state = ProgramState(Run(backend, sampling_fields(sampling)))
        self._signature.bind(state, *args, **kwargs)
        return state, functools.partial(self._body, state, *args, **kwargs)


function = Function
