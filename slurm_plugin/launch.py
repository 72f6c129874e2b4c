"""Run one launch of the ranks to its end: a srun command in, how it ended out; notices are recorded on the way.

Rule 1: after `committed` or `lost` the ranks leave by themselves; who has not after a moment is ended, on every node
        that can be reached, and nobody waits for one that cannot.
Rule 2: signal handlers only wake the loop; every wait in it ends with a deadline.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from slurm_plugin import outage
from slurm_plugin.notice import Listener
from slurm_plugin.overhear import Overhear, TaskEnd
from slurm_plugin.slurm import Slurm
from slurm_plugin.slurm_text import SlurmError

LEAVE: Final = 1.0  # seconds for ranks that have saved to leave: os._exit takes milliseconds
LEAVE_DEAD: Final = 0.3  # the same with a dead node: srun will not say when they have left
END: Final = 5.0  # seconds for a step whose nodes all live to end after SIGKILL
END_DEAD: Final = 0.2  # the same with a dead node: srun would wait for it, the tasks elsewhere are gone in milliseconds
TICK: Final = 1.0  # seconds between looks at the file system and at deadlines
MINORITY: Final = 60.0  # seconds that the larger side of a cut network gets when the smaller one could not save
LAST_WORDS: Final = 0.5  # seconds for srun's messages to come through after its end
DOUBLE: Final = 1.0  # seconds within which srun takes a second Ctrl-C for "end it"
EARLY: Final = 15.0  # seconds for the other ranks to end too when one has ended before training began
SPARE: Final = 30.0  # seconds beyond the ranks' own deadlines before they are given up

# srun passes these on to the ranks.
FORWARDED: Final = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGQUIT)
ENDING: Final = (signal.SIGTERM, signal.SIGHUP)  # srun would answer these by killing the ranks


class Signals:
    """The signals that have reached jit-srun; a context manager that puts the old handlers back."""

    def __init__(self) -> None:
        self._ours, self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old: dict[int, Any] = {}
        self._fd = -1

    def __enter__(self) -> Signals:
        self._fd = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        for number in (*FORWARDED, *ENDING, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, and `&` in a script: srun shall ignore it too
                self._old[number] = signal.signal(number, _nothing)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._fd)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        os.close(self._ours)
        os.close(self._wakeup)

    def fileno(self) -> int:
        """Return a descriptor that is readable when a signal has come."""
        return self._ours

    def take(self) -> list[int]:
        """Return the numbers of the signals since the last call."""
        try:
            return list(os.read(self._ours, 4096))
        except BlockingIOError:
            return []

    def wait(self, numbers: Sequence[int], patience: float) -> bool:
        """Wait until one of these has come, at most `patience` seconds; False when none has."""
        deadline = time.monotonic() + patience
        while not set(numbers) & set(self.take()):
            if (left := deadline - time.monotonic()) <= 0:
                return False
            select.select([self], [], [], left)
        return True


@dataclass(frozen=True)
class Ended:
    """How a launch ended.

    Attributes:
        code: of srun; None when jit-srun had to end it.
        interrupted: somebody at the keyboard ended it (Ctrl-C twice).
        silent: why jit-srun gave the ranks up, "" if it did not.
        unlaunched: why Slurm gave srun no step, so that no rank was started; "" otherwise.
    """

    code: int | None
    interrupted: bool = False
    silent: str = ""
    unlaunched: str = ""


class Launch:
    """One running srun and what is known of it.

    Args:
        nodes: the launch's nodes, in the order of the ranks.
        slurm, job_id: for signals to the step.
        record: called with every notice.
        committed: whether the claim of this launch is on the file system (its notice may have died with a node).
        reachable: asks the nodes; False when one of the step's does not answer. It may take a second.
        patience: seconds that the ranks may take from a fault to `committed` or `lost`.
        training: False when this may be any program: until a rank says that it trains, all is left to srun.
    """

    def __init__(
        self,
        line: Sequence[str],
        environ: Mapping[str, str],
        *,
        nodes: Sequence[str],
        slurm: Slurm,
        job_id: str,
        signals: Signals,
        listener: Listener,
        record: Callable[[dict[str, Any]], None],
        committed: Callable[[], bool],
        reachable: Callable[[], bool],
        patience: float,
        say: Callable[[str], None],
        early: float = EARLY,
        training: bool = True,
    ) -> None:
        self._early_patience = early
        self._training = training
        self._slurm, self._job_id, self._say = slurm, job_id, say
        self._signals, self._listener, self._record = signals, listener, record
        self._committed, self._reachable, self._patience = committed, reachable, patience + SPARE
        self._step, self._leave = "", LEAVE
        self._fault_at: float | None = None
        self._sealed_at: float | None = None
        self._keyboard: list[float] = []
        self._nodes = nodes  # may be filled later, by what the ranks say
        self._trained = False
        self._early: tuple[float, TaskEnd] | None = None  # the first task that ended before training began
        # close_fds=False: srun gets what the script has opened for it, as without us; what is ours closes itself.
        self._process = subprocess.Popen(line, env=dict(environ), stderr=subprocess.PIPE, close_fds=False)
        assert self._process.stderr is not None
        self._overhear = Overhear(self._process.stderr)

    def run(self) -> Ended:
        """Wait for the end and return it."""
        ended = self._run()
        self._overhear.close()
        return ended

    def only_wait(self) -> int:
        """Wait for the end after `run` has failed: pass on what srun says, and nothing else."""
        while self._process.poll() is None:
            self._drain()
        return _exit_code(self._process.returncode)

    def _run(self) -> Ended:
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._overhear, selectors.EVENT_READ)
            while self._process.poll() is None:
                for key, _ in selector.select(self._until_next_look()):
                    if key.fileobj is self._overhear:
                        self._note(self._overhear.listen())
                        if self._overhear.closed:
                            selector.unregister(self._overhear)
                for number in self._signals.take():
                    self._pass_on(number)
                self._hear()
                if self._over():
                    return self._end()
        self._hear()  # what arrived together with the end
        self._drain()
        unheard = self._training and not self._trained and self._fault_at is None
        if unheard and self._early is not None and self._early[1].kind == "death":
            self._record(self._early_fault(self._early[1]))  # the others' exit codes only follow from it
        unlaunched = "" if self._step or self._trained else self._overhear.refusal
        return Ended(_exit_code(self._process.returncode), self._interrupted(), unlaunched=unlaunched)

    def _note(self, ends: Sequence[TaskEnd]) -> None:
        if self._trained:
            return
        for end in ends:
            if self._early is None:
                self._early = (time.monotonic(), end)
            elif end.kind == "death" != self._early[1].kind:  # tasks that end because of it may be told of first
                self._early = (self._early[0], end)

    def _drain(self) -> None:
        """Pass on srun's last words."""
        deadline = time.monotonic() + LAST_WORDS
        while not self._overhear.closed and time.monotonic() < deadline:
            self._note(self._overhear.listen())
            if not self._overhear.closed:
                select.select([self._overhear], [], [], LAST_WORDS / 5)

    def _hear(self) -> None:
        for event in self._listener.receive():
            self._training = True
            self._trained = self._trained or event["event"] == "started"
            self._step = str(event.get("step") or self._step)
            if event["event"] == "fault":
                self._fault_at = self._fault_at or time.monotonic()
                fault = event.get("fault")
                if isinstance(fault, dict) and fault.get("unreachable"):
                    self._leave = LEAVE_DEAD
            if event["event"] in ("committed", "lost") and self._sealed_at is None:
                self._sealed_at = time.monotonic()
                if event.get("majority") is False:  # beyond the cut more ranks may still be saving
                    self._leave += MINORITY
            elif event["event"] == "committed":
                self._leave = min(self._leave, LEAVE)
            self._record(event)

    def _until_next_look(self) -> float:
        if self._sealed_at is not None:
            return max(0.0, min(TICK, self._sealed_at + self._leave - time.monotonic()))
        if self._early is not None and self._training and not self._trained:
            return min(TICK, self._early_patience)
        return TICK if self._fault_at is not None else 10 * TICK

    def _over(self) -> bool:
        """Whether the ranks have had their time."""
        now = time.monotonic()
        if self._fault_at is not None and self._sealed_at is None and self._committed():
            self._sealed_at = now
        if self._sealed_at is not None:
            return now >= self._sealed_at + self._leave
        if (
            self._early is not None
            and self._training
            and not self._trained
            and self._fault_at is None
            and now >= self._early[0] + self._early_patience
        ):
            self._record(self._early_fault(self._early[1]))
            self._sealed_at = now
            return True
        return self._fault_at is not None and now >= self._fault_at + self._patience

    def _early_fault(self, end: TaskEnd) -> dict[str, Any]:
        nodes = list(self._nodes)
        rank = nodes.index(end.node) if end.node in nodes else 0
        detail = f"task {end.tasks} on {end.node} ended before training began: {end.how}"
        fault = {"kind": end.kind, "ranks": [rank], "unreachable": [], "minibatch": -1, "detail": detail}
        return {"event": "fault", "fault": fault, "nodes": nodes, "phase": "starting"}

    def _end(self) -> Ended:
        """End the step on every node that can be reached, then the local srun."""
        silent = (
            "" if self._sealed_at is not None else f"no word from the ranks for {self._patience:.0f} s after the fault"
        )
        self._kill_step()
        try:
            self._process.wait(END if self._reachable() else END_DEAD)
            code = _exit_code(self._process.returncode)
        except subprocess.TimeoutExpired:
            code = None
            self._process.kill()
            self._process.wait()
        self._hear()
        self._drain()
        return Ended(code, self._interrupted(), silent)

    def _pass_on(self, number: int) -> None:
        if number == signal.SIGINT and _from_keyboard():
            self._keyboard.append(time.monotonic())  # the terminal has sent it to srun as well
        elif number in FORWARDED or (number in ENDING and not self._training):
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
        elif number in ENDING:
            self._end_by_signal(number)

    def _end_by_signal(self, number: int) -> None:
        """Pass TERM on unless Slurm is ending the whole job: then the ranks have got theirs from Slurm."""
        try:
            if self._slurm.job(self._job_id).state != "RUNNING":
                return
        except SlurmError as error:
            self._say(str(error))
        self._say(f"{signal.Signals(number).name} received, passed on to the ranks")
        self._signal_step("TERM")

    def _signal_step(self, name: str) -> None:
        try:
            self._ask_for_signal(name)
        except SlurmError as error:
            self._say(f"cannot signal the step: {error}")

    def _kill_step(self) -> None:
        """End the ranks that are left; without slurmctld there would be no next launch either, so it is waited for."""
        try:
            outage.ask(self._slurm, lambda: self._ask_for_signal("KILL"), self._say)
        except SlurmError as error:
            self._say(f"cannot end the step: {error}")

    def _ask_for_signal(self, name: str) -> None:
        step = self._slurm.step_of(self._job_id, self._process.pid) or self._step
        if step:
            self._slurm.cancel_step(self._job_id, step, name)

    def _interrupted(self) -> bool:
        return any(b - a <= DOUBLE for a, b in zip(self._keyboard, self._keyboard[1:], strict=False))


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _from_keyboard() -> bool:
    """Whether a SIGINT came from the terminal, which sends it to the whole foreground group."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _nothing(number: int, frame: object) -> None:
    """Leave it to the wakeup descriptor."""
