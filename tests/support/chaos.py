"""What can go wrong in a run, made to happen at a chosen moment: SIGKILL, without a goodbye; a hang; an overflow."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from malmen.errors import EditError
from malmen.platform.hypernet_actor import HypernetActor


def die_once(mark: Path) -> None:
    """Whoever comes first leaves the mark and is killed; all others live."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def mortal_actor(once: Sequence[int], always: int, marks: Path) -> type[HypernetActor]:
    """HypernetActor of which one dies before it solves some steps, and all die whenever they are to solve `always`."""

    def solve(self: HypernetActor, generation: str, step: int | None, dtype: str) -> Any:
        if step in once:
            die_once(marks / f"actor{step}")
        if step == always:
            os.kill(os.getpid(), signal.SIGKILL)
        return HypernetActor.solve(self, generation, step, dtype)

    return type("HypernetActor", (HypernetActor,), {"solve": solve})


def mortal_loop(once: Sequence[int], always: int, marks: Path) -> Callable[[Mapping[str, Any]], None]:
    """The ranks' loop, in which one dies at some steps, and all die whenever they are at step `always`."""

    def loop(settings: Mapping[str, Any]) -> None:
        from malmen.platform import train_loop
        from malmen.platform.lm_worker import LMWorker

        class MortalWorker(LMWorker):
            def meta_backward(self, at: int, *args: Any) -> Any:
                if at in once:
                    die_once(marks / f"lm{at}")
                if at == always:
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().meta_backward(at, *args)

        train_loop.LMWorker = MortalWorker  # type: ignore[misc]
        train_loop.train_loop(settings)

    return loop


def unreadable_loop() -> Callable[[Mapping[str, Any]], None]:
    """The ranks' loop, in which the storage cannot be read when the actors are restored."""

    def loop(settings: Mapping[str, Any]) -> None:
        from malmen.platform import train_loop

        def saved_step(self: Any) -> None:
            raise EditError("the storage cannot be read")

        train_loop.Rank._saved_step = saved_step  # type: ignore[method-assign,assignment]
        train_loop.train_loop(settings)

    return loop


def dying_actor(deaths: Mapping[int, tuple[str, str]], marks: Path) -> type[HypernetActor]:
    """HypernetActor with deaths by step: one of the actors dies in a method, `before` or `after` its work."""

    def fatal(method: str) -> Callable[..., Any]:
        original = getattr(HypernetActor, method)

        def call(self: HypernetActor, generation: str, step: int, *args: Any) -> Any:
            if deaths.get(step) == (method, "before"):
                die_once(marks / f"actor{step}")
            answer = original(self, generation, step, *args)
            if deaths.get(step) == (method, "after"):
                die_once(marks / f"actor{step}")
            return answer

        return call

    methods = {method for method, _ in deaths.values()}
    return type("HypernetActor", (HypernetActor,), {method: fatal(method) for method in methods})


def dying_loop(deaths: Mapping[int, str], marks: Path) -> Callable[[Mapping[str, Any]], None]:
    """The ranks' loop, in which one of them dies while it is in `trace` or `meta_backward` for the n-th time."""

    def loop(settings: Mapping[str, Any]) -> None:
        from malmen.platform import train_loop
        from malmen.platform.lm_worker import LMWorker

        calls = {"trace": 0, "meta_backward": 0}

        class DyingWorker(LMWorker):
            def _count(self, method: str) -> None:
                calls[method] += 1
                if deaths.get(calls[method]) == method:
                    die_once(marks / f"lm{calls[method]}{method}")

            def trace(self, *args: Any, **options: Any) -> Any:
                answer = super().trace(*args, **options)
                self._count("trace")
                return answer

            def meta_backward(self, *args: Any) -> Any:
                self._count("meta_backward")
                return super().meta_backward(*args)

        train_loop.LMWorker = DyingWorker  # type: ignore[misc]
        train_loop.train_loop(settings)

    return loop


def waiting_loop(step: int, mark: Path) -> Callable[[Mapping[str, Any]], None]:
    """The ranks' loop, in which they note who they are and wait at a step until the mark is there."""

    def loop(settings: Mapping[str, Any]) -> None:
        from malmen.platform import train_loop
        from malmen.platform.lm_worker import LMWorker

        class WaitingWorker(LMWorker):
            def meta_backward(self, at: int, *args: Any) -> Any:
                if at == step:
                    mark.with_name(f"waited-{os.getpid()}").touch()
                    for _ in range(600):
                        if mark.exists():
                            break
                        threading.Event().wait(0.1)
                return super().meta_backward(at, *args)

        train_loop.LMWorker = WaitingWorker  # type: ignore[misc]
        train_loop.train_loop(settings)

    return loop


def hanging_actor() -> type[HypernetActor]:
    """HypernetActor that can be asked to hang, as one does whose peer is lost."""

    def hang(self: HypernetActor) -> None:
        with self._note("hanging"):
            threading.Event().wait(60)

    return type("HypernetActor", (HypernetActor,), {"hang": hang})


def overflowing_loop(step: int) -> Callable[[Mapping[str, Any]], None]:
    """The ranks' loop, in which the shifts of one step are infinite."""

    def loop(settings: Mapping[str, Any]) -> None:
        from malmen.platform import train_loop
        from malmen.platform.lm_worker import LMWorker

        class OverflowingWorker(LMWorker):
            def meta_backward(self, at: int, batch: Any, shifts: Mapping[str, Any]) -> Any:
                factor = math.inf if at == step else 1.0
                return super().meta_backward(at, batch, {name: shift * factor for name, shift in shifts.items()})

        train_loop.LMWorker = OverflowingWorker  # type: ignore[misc]
        train_loop.train_loop(settings)

    return loop
