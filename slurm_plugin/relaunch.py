"""jit-srun: start the ranks of a job, and start them again after a failure. The wiring of the cluster's side.

    arguments -> Request   trainings -> its directory   standing -> nodes
    launch -> Ended   outcomes -> Outcome   recovery -> Recovery

Rule 1: without --jit-ckpt, outside a job, or where Slurm cannot be asked, jit-srun is srun.
Rule 2: every decision is in the journal and on standard error before it is carried out.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NoReturn

from slurm_plugin import arguments, contract, hold, notice, outage, outcomes, trainings
from slurm_plugin.allocation import Site, find_site
from slurm_plugin.journal import Checkpoint, Journal, JournalError, find_checkpoints, has_claim
from slurm_plugin.launch import ENDING, Ended, Launch, Signals
from slurm_plugin.outcomes import Outcome
from slurm_plugin.recovery import Case, Recovery, decide
from slurm_plugin.requeue import requeue_from_inside
from slurm_plugin.slurm import Slurm, open_slurm
from slurm_plugin.slurm_text import JobInfo, SlurmError
from slurm_plugin.standing import Standing
from slurm_plugin.told import names, say, told
from slurm_plugin.trainings import Fingerprint

USAGE: Final = """usage: jit-srun [srun options] program [arguments]

Start the ranks of a job with srun. In a job submitted with --jit-ckpt, start them again after a failure: on the nodes
of the allocation that still work, spare ones included, or through the queue. Without --jit-ckpt it is srun.

  -N, --nodes=K    nodes that the ranks need; what the job has beyond K is kept as spare nodes
                   (default: all but those of --jit-ckpt=spares=S)
  -n, -w, -x, --ntasks-per-node, --export and all other options: as in srun(1)

The job's settings are those of sbatch --jit-ckpt=key=value,...; what happened is in <dir>/<job id>/journal.jsonl.
Exit code: that of srun; 83 or 84 when the ranks left after a failure that was or was not saved; 85 for bad input."""

TURN: Final = 10.0  # seconds that one jit-srun of a script may take to choose its nodes before the next one goes ahead
FAREWELL: Final = 10.0  # seconds for Slurm to end the script after a requeue; what comes behind srun in it must not run
PORTS: Final = (20000, 10000)  # MASTER_PORT: below the ports that Linux gives to clients
MASTER: Final = ("MASTER_ADDR", "MASTER_PORT")
VARIABLES: Final = (contract.ENV_ATTEMPT, contract.ENV_LAUNCHER, contract.ENV_TRAINING)
# What srun would read as the size of the step; jit-srun has said it on the command line.
SIZES: Final = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command jit-srun."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["--help"], ["-h"]) or not words:
        print(USAGE)
        return 0 if words else contract.EXIT_REFUSED
    text = os.environ.get(contract.ENV_OPTIONS) or os.environ.get(contract.ENV_OPTIONS_JOB) or ""
    if not text or "SLURM_JOB_ID" not in os.environ:
        _plain_srun(words, "no --jit-ckpt in this job" if text == "" else "not in a job")
    try:
        with Signals() as signals:
            return _start(words, text, signals)
    except (arguments.ArgumentError, contract.OptionError, JournalError) as error:
        say(str(error))
        return contract.EXIT_REFUSED


def _start(words: Sequence[str], text: str, signals: Signals) -> int:
    options = contract.parse_options(text)
    try:
        slurm = open_slurm()
        site = find_site(slurm, os.environ, arguments.parse(words, os.environ, options.spares))
    except SlurmError as error:
        _plain_srun(words, f"cannot relaunch: {error}")
    options = contract.in_job(options, site.job)
    known_by = trainings.fingerprint(words, os.getcwd(), os.environ)
    known = trainings.find(options.dir, site.job, known_by.cluster)
    over = trainings.over(known, site.restarts, partial(outage.forgot, slurm, say, site.job))
    name, _hold = trainings.claim(known, site.job, known_by, site.restarts, over)
    journal = Journal(options.dir, name, say)
    if name in over:
        return trainings.leave_over(journal, site.restarts)
    return Relauncher(slurm, site, options, journal, signals, known_by).run()


class Relauncher:
    """One jit-srun: launch, decide, launch again, until the job is done, stopped or back in the queue.

    Args:
        known_by: noted with the first launch, for the next life of the job to find this training's directory.
        master: the node that MASTER_ADDR of the environment means; "" when jit-srun chooses from the start.
    """

    def __init__(
        self,
        slurm: Slurm,
        site: Site,
        options: contract.Options,
        journal: Journal,
        signals: Signals,
        known_by: Fingerprint,
        master: str = "",
    ) -> None:
        self._slurm, self._site, self._options = slurm, site, options
        self._journal, self._signals = journal, signals
        self._known_by: Fingerprint | None = known_by
        self._master = master
        self._standing = Standing(slurm, site, options.dir, os.path.basename(journal.directory))

    def run(self) -> int:
        """Return the exit code of the training."""
        with self._turn():
            nodes = self._standing.first()
            attempt = self.announce(nodes)
        return self.go_on(attempt, self._launch(attempt, nodes))

    def go_on(self, attempt: int, ended: Ended) -> int:
        """Decide what happens after a launch, and do it, until the end; return the exit code of the training."""
        while True:
            with self._turn():
                outcome, recovery = self._decide(attempt, ended)
                fields = {"nodes": recovery.nodes, "exclude": recovery.exclude, "reason": recovery.reason}
                self._journal.append("decision", attempt, action=recovery.action, **fields)
                if recovery.action == "relaunch":
                    attempt = self.announce(recovery.nodes)
            say(f"{recovery.action}: {recovery.reason}")
            if recovery.action == "relaunch":
                time.sleep(recovery.pause)
                ended = self._launch(attempt, recovery.nodes)
                continue
            if recovery.action == "requeue":
                self._requeue(recovery)
            return _exit_code(outcome)

    def announce(self, nodes: Sequence[str]) -> int:
        """Note a launch that is about to begin; return its number."""
        attempt = self._journal.next_attempt()
        self._tell_unseen(attempt - 1)
        spares = [n for n in self._site.nodes if n in self._standing.answering() and n not in nodes]
        known_by = self._known_by.to_entry() if self._known_by else {}
        self._known_by = None
        restarts = self._site.restarts
        self._journal.append("launch", attempt, restarts=restarts, nodes=list(nodes), spares=spares, **known_by)
        return attempt

    def _tell_unseen(self, attempt: int) -> None:
        """Say what the ranks could not say when jit-srun was dead with its node, and srun with it."""
        last = [e for e in self._journal.entries if e.get("attempt") == attempt]
        launch = next((e for e in last if e.get("entry") == "launch"), None)
        here = self._site.restarts
        if launch and launch.get("restarts") != here and not any(e.get("entry") == "outcome" for e in last):
            say(f"launch {attempt} ended unseen: its jit-srun was lost with its node, or the job ended from outside")

    def _turn(self) -> contextlib.AbstractContextManager[None]:
        """Keep the other trainings of this script from choosing the same nodes at the same time."""
        return hold.holding(self._site.job, "nodes", TURN)

    def _launch(self, attempt: int, nodes: Sequence[str]) -> Ended:
        """Start the ranks and wait for their end; the journal has all of it."""
        if len(nodes) < self._site.need:
            return self._not_enough(attempt)
        spares = self._journal.entries[-1].get("spares")
        say(f"launch {attempt} on {names(nodes)}" + (f", spare: {names(spares)}" if spares else ""))
        self._standing.ask_again()
        listener = notice.Listener()
        try:
            self._signals.take()  # what came between two launches is in the state of the job by now
            launch = Launch(
                arguments.command(self._site.request, nodes, (*VARIABLES, *MASTER)),
                self._environ(attempt, nodes, listener),
                nodes=nodes,
                slurm=self._slurm,
                job_id=self._site.job,
                signals=self._signals,
                listener=listener,
                record=lambda event: self.record(attempt, event),
                committed=lambda: self.committed(attempt),
                reachable=lambda: self.reachable(nodes),
                patience=self._options.settle + self._options.save,
                say=say,
            )
            ended = launch.run()
        finally:
            listener.close()
        if listener.dropped:
            say(f"{listener.dropped} connections brought no notice of this launch and were dropped")
        return self.note_end(attempt, ended)

    def note_end(self, attempt: int, ended: Ended) -> Ended:
        """Put the end of a launch into the journal."""
        if ended.silent:
            self.record(attempt, {"event": "lost", "reason": ended.silent, "error": ""})
        how = {"interrupted": ended.interrupted, "unlaunched": ended.unlaunched}
        self._journal.append("outcome", attempt, code=ended.code, **how)
        return ended

    def committed(self, attempt: int) -> bool:
        """Say whether this launch has committed its checkpoint."""
        return has_claim(self._journal.directory, attempt)

    def reachable(self, nodes: Sequence[str]) -> bool:
        """Say whether all of these nodes answer."""
        return self._standing.answering() >= set(nodes)

    def _not_enough(self, attempt: int) -> Ended:
        """Note a launch that could not even begin as the death of the nodes that do not answer."""
        gone = [n for n in self._site.nodes if n not in self._standing.answering()]
        ranks = list(range(len(gone)))
        detail = f"{self._site.need} nodes are needed and {len(self._site.nodes) - len(gone)} answer"
        fault = {"kind": "death", "ranks": ranks, "unreachable": ranks, "minibatch": -1, "detail": detail}
        self.record(attempt, {"event": "fault", "fault": fault, "nodes": gone, "phase": "starting"})
        return Ended(None)

    def _decide(self, attempt: int, ended: Ended) -> tuple[Outcome, Recovery]:
        *history, outcome = (self._claimed(o) for o in outcomes.read(self._journal.entries) if o.attempt <= attempt)
        job = self._job()
        case = Case(
            outcome=outcome,
            history=tuple(history),
            allocation=self._standing.allocation(job, outcome.nodes),
            options=self._options,
            job=job,
            checkpoint=self._checkpoint(),
            restarts=self._site.restarts,
            now=time.time(),
        )
        return outcome, decide(case)

    def _claimed(self, outcome: Outcome) -> Outcome:
        """A claim on the file system counts even when its notice was lost."""
        if outcome.committed is None and has_claim(self._journal.directory, outcome.attempt):
            return replace(outcome, committed=max(0, outcome.reached))
        return outcome

    def _checkpoint(self) -> Checkpoint | None:
        found = find_checkpoints(self._journal.directory)
        if found or not self._options.resume:
            return found[-1] if found else None
        name = re.match(r"m(\d+)-", os.path.basename(os.path.normpath(self._options.resume)))
        return Checkpoint(-1, int(name.group(1)) if name else 0)

    def _job(self) -> JobInfo | None:
        try:
            return outage.ask(self._slurm, lambda: self._slurm.job(self._site.job), say)
        except SlurmError as error:
            say(f"cannot ask Slurm about the job: {error}")
            return None

    def record(self, attempt: int, event: dict[str, Any]) -> None:
        """Note what a rank has said, and tell the user."""
        self._journal.append("notice", attempt, notice=event)
        self._standing.lost(outcomes.hear(Outcome(attempt), event).unreachable)
        text = told(event)
        if text:
            say(text)

    def _requeue(self, recovery: Recovery) -> None:
        def ends() -> bool:  # Slurm ends the script now; what comes behind srun in it must not run
            return self._signals.wait(ENDING, FAREWELL)

        restarts = self._site.restarts
        if not requeue_from_inside(self._slurm, self._site.job, recovery.exclude, say, restarts=restarts, ends=ends):
            say("the job was not put back into the queue")

    def _environ(self, attempt: int, nodes: Sequence[str], listener: notice.Listener) -> dict[str, str]:
        environ = {**{name: value for name, (value, _) in contract.NCCL.items()}, **os.environ}
        if self._site.request.nodes:
            for name in SIZES:
                environ.pop(name, None)
        first, many = PORTS
        trainings.for_ranks(
            environ, attempt, listener.launcher(self._site.host), os.path.basename(self._journal.directory)
        )
        if nodes[0] != self._master or "MASTER_ADDR" not in environ:
            environ["MASTER_ADDR"] = self._site.hosts.get(nodes[0], nodes[0])
        environ["MASTER_PORT"] = str(first + secrets.randbelow(many))
        return environ


def _exit_code(outcome: Outcome) -> int:
    if outcome.code is not None:
        return outcome.code
    return contract.EXIT_LOST if outcome.committed is None else contract.EXIT_COMMITTED


def _plain_srun(words: Sequence[str], why: str) -> NoReturn:
    say(f"{why}: this is plain srun")
    os.environ.setdefault(contract.ENV_ATTEMPT, os.environ.get("SLURM_RESTART_COUNT") or "0")  # for packaging/srun
    try:
        os.execvp("srun", ["srun", *words])
    except OSError as error:
        say(f"cannot start srun: {error.strerror}")
        sys.exit(127)


if __name__ == "__main__":
    sys.exit(main())
