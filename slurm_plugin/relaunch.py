"""jit-srun: start the ranks of a job, and start them again after a failure. The wiring of the cluster's side.

    arguments -> Request   launch -> Ended   outcomes -> Outcome   recovery -> Recovery   requeue

Rule 1: without --jit-ckpt, outside a job, or where Slurm cannot be asked, jit-srun is srun.
Rule 2: every decision is in the journal and on standard error before it is carried out.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn

from slurm_plugin import arguments, contract, notice, outage, outcomes
from slurm_plugin.allocation import Site, find_site
from slurm_plugin.journal import Checkpoint, Journal, JournalError, find_checkpoints, has_claim
from slurm_plugin.launch import Ended, Launch, Signals
from slurm_plugin.outcomes import Outcome
from slurm_plugin.recovery import Allocation, Case, Recovery, decide
from slurm_plugin.requeue import requeue_job
from slurm_plugin.slurm import Slurm, open_slurm
from slurm_plugin.slurm_text import JobInfo, SlurmError

USAGE: Final = """usage: jit-srun [srun options] program [arguments]

Start the ranks of a job with srun. In a job submitted with --jit-ckpt, start them again after a failure: on the nodes
of the allocation that still work, spare ones included, or through the queue. Without --jit-ckpt it is srun.

  -N, --nodes=K    nodes that the ranks need; what the job has beyond K is kept as spare nodes
                   (default: all but those of --jit-ckpt=spares=S)
  -n, -w, -x, --ntasks-per-node, --export and all other options: as in srun(1)

The job's settings are those of sbatch --jit-ckpt=key=value,...; what happened is in <dir>/<job id>/journal.jsonl.
Exit code: that of srun; 83 or 84 when the ranks left after a failure that was or was not saved; 85 for bad input."""

PORTS: Final = (20000, 10000)  # MASTER_PORT: below the ports that Linux gives to clients
VARIABLES: Final = (contract.ENV_ATTEMPT, contract.ENV_LAUNCHER, "MASTER_ADDR", "MASTER_PORT")
# What srun would read as the size of the step; jit-srun has said it on the command line.
SIZES: Final = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
FRESH: Final = 3.0  # seconds for which an answer of the nodes is good


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
    journal = Journal(options.dir, site.job, say)
    return Relauncher(slurm, site, options, journal, signals).run()


class Relauncher:
    """One jit-srun: launch, decide, launch again, until the job is done, stopped or back in the queue."""

    def __init__(self, slurm: Slurm, site: Site, options: contract.Options, journal: Journal, signals: Signals) -> None:
        self._slurm, self._site, self._options = slurm, site, options
        self._journal, self._signals = journal, signals
        self._asked: tuple[float, frozenset[str]] = (-FRESH, frozenset())
        self._gone: set[str] = set()  # nodes that the ranks saw die; asking them again would cost a second

    def run(self) -> int:
        """Return the exit code of the job."""
        nodes = [n for n in self._site.nodes if n in self._answering()][: self._site.need]
        while True:
            attempt = self._journal.next_attempt()
            ended = self._launch(attempt, nodes)
            outcome, recovery = self._decide(attempt, ended)
            fields = {"nodes": recovery.nodes, "exclude": recovery.exclude, "reason": recovery.reason}
            self._journal.append("decision", attempt, action=recovery.action, **fields)
            say(f"{recovery.action}: {recovery.reason}")
            if recovery.action == "relaunch":
                nodes = list(recovery.nodes)
                time.sleep(recovery.pause)
                continue
            if recovery.action == "requeue":
                self._requeue(recovery)
            return _exit_code(outcome)

    def _launch(self, attempt: int, nodes: Sequence[str]) -> Ended:
        """Start the ranks and wait for their end; the journal has all of it."""
        spares = [n for n in self._site.nodes if n in self._answering() and n not in nodes]
        restarts = self._site.restarts
        self._journal.append("launch", attempt, restarts=restarts, nodes=list(nodes), spares=spares)
        if len(nodes) < self._site.need:
            return self._not_enough(attempt)
        spare = f", spare: {_names(spares)}" if spares else ""
        say(f"launch {attempt} on {_names(nodes)}{spare}")
        self._asked = (-FRESH, frozenset())
        listener = notice.Listener()
        try:
            self._signals.take()  # what came between two launches is in the state of the job by now
            launch = Launch(
                arguments.command(self._site.request, nodes, VARIABLES),
                self._environ(attempt, nodes, listener),
                nodes=nodes,
                slurm=self._slurm,
                job_id=self._site.number,
                signals=self._signals,
                listener=listener,
                record=lambda event: self._record(attempt, event),
                committed=lambda: has_claim(self._journal.directory, attempt),
                reachable=lambda: self._answering() >= set(nodes),
                patience=self._options.settle + self._options.save,
                say=say,
            )
            ended = launch.run()
        finally:
            listener.close()
        if ended.silent:
            self._record(attempt, {"event": "lost", "reason": ended.silent, "error": ""})
        if listener.dropped:
            say(f"{listener.dropped} connections brought no notice of this launch and were dropped")
        how = {"interrupted": ended.interrupted, "unlaunched": ended.unlaunched}
        self._journal.append("outcome", attempt, code=ended.code, **how)
        return ended

    def _not_enough(self, attempt: int) -> Ended:
        """Note a launch that could not even begin as the death of the nodes that do not answer."""
        gone = [n for n in self._site.nodes if n not in self._answering()]
        ranks = list(range(len(gone)))
        detail = f"{self._site.need} nodes are needed and {len(self._site.nodes) - len(gone)} answer"
        fault = {"kind": "death", "ranks": ranks, "unreachable": ranks, "minibatch": -1, "detail": detail}
        self._record(attempt, {"event": "fault", "fault": fault, "nodes": gone, "phase": "starting"})
        return Ended(None)

    def _decide(self, attempt: int, ended: Ended) -> tuple[Outcome, Recovery]:
        *history, outcome = (self._claimed(o) for o in outcomes.read(self._journal.entries) if o.attempt <= attempt)
        job = self._job()
        nodes = job.nodes if job and job.nodes else self._site.nodes
        kept = tuple(n for n in self._site.nodes if n in nodes)
        if 2 * len(self._gone.intersection(outcome.nodes)) > len(outcome.nodes):
            self._gone.clear()  # so many: this node may have been the one that was cut off, and they answer again
            self._asked = (-FRESH, frozenset())
        case = Case(
            outcome=outcome,
            history=tuple(history),
            allocation=Allocation(kept, self._answering(), self._site.need, self._drained()),
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

    def _drained(self) -> frozenset[str]:
        """Return the nodes on which Slurm would start no new job."""
        try:
            known = self._slurm.nodes(self._site.nodes)
        except SlurmError:
            return frozenset()  # unknown
        return frozenset(name for name, node in known.items() if node.closed)

    def _answering(self) -> frozenset[str]:
        """Return the nodes that answer; asked once for what happens within a moment."""
        asked, nodes = self._asked
        if time.monotonic() - asked >= FRESH:
            addresses = {n: a for n, a in self._site.addresses.items() if n not in self._gone}
            nodes = notice.answering(addresses) if self._site.addresses else frozenset(self._site.nodes)
            self._asked = (time.monotonic(), nodes)
        return nodes

    def _record(self, attempt: int, event: dict[str, Any]) -> None:
        self._journal.append("notice", attempt, notice=event)
        self._gone.update(outcomes.hear(Outcome(attempt), event).unreachable)
        text = _told(event)
        if text:
            say(text)

    def _requeue(self, recovery: Recovery) -> None:
        done = requeue_job(self._slurm, self._site.job, recovery.exclude, say, restarts=self._site.restarts)
        if not done:
            say("the job was not put back into the queue")

    def _environ(self, attempt: int, nodes: Sequence[str], listener: notice.Listener) -> dict[str, str]:
        environ = {**{name: value for name, (value, _) in contract.NCCL.items()}, **os.environ}
        if self._site.request.nodes:
            for name in SIZES:
                environ.pop(name, None)
        first, many = PORTS
        environ[contract.ENV_ATTEMPT] = str(attempt)
        environ[contract.ENV_LAUNCHER] = listener.launcher(self._site.host)
        environ["MASTER_ADDR"] = self._site.hosts.get(nodes[0], nodes[0])
        environ["MASTER_PORT"] = str(first + secrets.randbelow(many))
        return environ


def say(text: str) -> None:
    """Tell the user one thing in one line."""
    sys.stderr.write(f"jit-srun: {' '.join(text.split())}\n")
    sys.stderr.flush()


def _told(event: Mapping[str, Any]) -> str:
    """Say a notice in one line; "" for those that are no news."""
    match event.get("event"):
        case "started":
            restored = f", restored from {event['restored']}" if event.get("restored") else ""
            return f"training begins at minibatch {event.get('minibatch')}{restored}"
        case "fault":
            fault = event.get("fault")
            return f"fault: {fault.get('kind')}: {fault.get('detail')}" if isinstance(fault, dict) else "fault"
        case "committed":
            return f"saved: minibatch {event.get('minibatch')} in {event.get('directory')}"
        case "lost":
            return f"not saved: {event.get('reason')} {event.get('error') or ''}"
    return ""


def _names(nodes: Sequence[str]) -> str:
    return ",".join(nodes) if len(nodes) <= 8 else f"{nodes[0]},{nodes[1]},...,{nodes[-1]} ({len(nodes)} nodes)"


def _exit_code(outcome: Outcome) -> int:
    if outcome.code is not None:
        return outcome.code
    return contract.EXIT_LOST if outcome.committed is None else contract.EXIT_COMMITTED


def _plain_srun(words: Sequence[str], why: str) -> NoReturn:
    say(f"{why}: this is plain srun")
    try:
        os.execvp("srun", ["srun", *words])
    except OSError as error:
        say(f"cannot start srun: {error.strerror}")
        sys.exit(127)


if __name__ == "__main__":
    sys.exit(main())
