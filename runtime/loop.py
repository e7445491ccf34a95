"""The thread that owns an engine: takes requests and aborts from any thread, steps while there is work, publishes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.handle import RequestHandle, Wakes
from trtllm_replayssm.runtime.outputs import RequestOutput, request_output
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.scheduler.request import DEFAULT_PRIORITY, Request

Result = TypeVar("Result")


class EngineLoop:
    """Runs one engine in a background thread until closed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wake = threading.Condition()  # reentrant
        self._commands: list[Callable[[], None]] = []
        self._handles: dict[int, RequestHandle] = {}  # of requests that have not ended; guarded by _wake
        self._asked: set[Future[Any]] = set()  # of calls whose answer somebody waits for; guarded by _wake
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="replayssm-engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> BaseException | None:
        """What stopped the engine, None while it runs."""
        return self._failure

    def prepare(
        self, prompt: str | Sequence[int], params: SamplingParams, *, priority: float = DEFAULT_PRIORITY
    ) -> Request:
        """A checked request that has not started. Raises RequestError."""
        return self._engine.make_request(prompt, params, priority=priority)

    def start(self, request: Request, *, streaming: bool) -> RequestHandle:
        """Hand a prepared request to the engine. Raises ContractError when the loop is closed, or what stopped it."""
        handle = RequestHandle(request_output(request), streaming=streaming, abort=self.abort)
        with self._wake:
            self._post(lambda: self._engine.enqueue(request))
            # Known before the engine sees it: whatever ends the loop meanwhile also ends this handle.
            self._handles[request.request_id] = handle
        return handle

    def abort(self, request_id: int) -> None:
        """End a request soon; its handle then reads "cancelled"."""
        self._post(lambda: self._cancel([request_id]), late=True)

    def call(self, action: Callable[[Engine], None]) -> None:
        """Run something on the engine between two of its steps, in its thread; returns at once."""
        self._post(lambda: action(self._engine))

    def ask(self, action: Callable[[Engine], Result]) -> Result:
        """As `call`, and wait for what it returns or raises; the engine goes on. Not from the engine's thread."""
        answer: Future[Result] = Future()

        def command() -> None:
            try:
                answer.set_result(action(self._engine))
            except Exception as error:
                answer.set_exception(error)

        with self._wake:
            self._post(command)
            self._asked.add(answer)
        try:
            return answer.result()
        finally:
            with self._wake:
                self._asked.discard(answer)

    def resume(self, path: str | Path, *, streaming: bool) -> RequestHandle:
        """Go on with a request in a file, see `Engine.import_request`."""

        def action(engine: Engine) -> RequestHandle:
            output = engine.output_of(engine.import_request(path))
            assert output is not None, "a request that was queued just now"
            handle = RequestHandle(output, streaming=streaming, abort=self.abort)
            with self._wake:
                self._handles[handle.request_id] = handle
            return handle

        return self.ask(action)

    def close(self) -> None:
        """Cancel what runs, end the thread and what the session has outside this process. May be called twice."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, command: Callable[[], None], *, late: bool = False) -> None:
        with self._wake:
            if self._closing or self._failure is not None:
                if late:
                    return
                if self._failure is not None:
                    raise self._failure
                raise ContractError("LLM", "request", expected="a running engine", got="one that was shut down")
            self._commands.append(command)
            self._wake.notify_all()

    def _run(self) -> None:
        try:
            self._engine.warm_up()
            while self._turn():
                pass
        except BaseException as failure:
            with self._wake:
                self._failure = failure
                handles, self._handles = self._handles, {}
                self._commands.clear()
                asked = [answer for answer in self._asked if not answer.done()]
            for answer in asked:
                answer.set_exception(failure)
            for handle in handles.values():
                handle.fail(failure)
        finally:
            self._engine.close()

    def _turn(self) -> bool:
        """Commands, then one step; False when the loop has closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._closing or self._commands or self._engine.has_work)
            commands, self._commands = self._commands, []
            closing = self._closing
        for command in commands:
            command()
        with self._wake:
            ending = tuple(self._handles) if closing else ()
        self._cancel(ending)
        if closing:
            return False
        self._tell(self._engine.step())
        return True

    def _cancel(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            output = self._engine.cancel(request_id)
            (handle,) = self._handles_of([request_id])
            if output is not None and handle is not None:
                self._publish([(handle, output)])

    def _tell(self, moved: Sequence[Request]) -> None:
        """Requests have moved: whoever reads them gets to know."""
        pairs = zip(self._handles_of([request.request_id for request in moved]), moved, strict=True)
        told = ((h, r) for h, r in pairs if h is not None and (h.streaming or r.finished))
        self._publish((handle, request_output(request)) for handle, request in told)
        for request in moved:
            if request.finished:
                request.let_go()

    def _handles_of(self, request_ids: Sequence[int]) -> list[RequestHandle | None]:
        with self._wake:
            return [self._handles.get(request_id) for request_id in request_ids]

    def _publish(self, news: Iterable[tuple[RequestHandle, RequestOutput]]) -> None:
        """Outputs to their handles, all of a step before any reader in an event loop wakes: one that woke earlier would
        contend for the interpreter with the rest. news: made one by one, each output taking the place of the one before
        it, so that the garbage collector, which counts what is made and not yet gone, sees nothing of a step.
        """
        wakes, ended = Wakes(), []
        try:
            for handle, output in news:
                handle.publish(output, wakes)
                if output.finished:
                    ended.append(output.request_id)
        finally:  # whatever stops it, readers that were told so far have left the handles: nobody else wakes them
            with self._wake:
                for request_id in ended:
                    self._handles.pop(request_id, None)
            wakes.send()
