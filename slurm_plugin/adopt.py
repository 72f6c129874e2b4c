"""Watch an srun that a batch script has started, and take it over when its ranks say that they train.

    packaging/srun -> take_over -> srun, as the user wrote it -> a rank attaches -> Relauncher

Rule 1: until a rank attaches nothing is written, said or asked of Slurm, and every signal is srun's: `srun hostname`
    does what it did. Except in a later life of the job: a training that may be over is asked about and passed over.
Rule 2: a failure of ours before srun runs is srun with the same arguments; one behind that ends the protection only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from slurm_plugin import arguments, contract, notice, outage, relaunch, trainings
from slurm_plugin.allocation import find_site, job_name
from slurm_plugin.arguments import Request
from slurm_plugin.hold import Hold
from slurm_plugin.journal import Journal, next_attempt, read
from slurm_plugin.launch import Launch, Signals
from slurm_plugin.relaunch import Relauncher
from slurm_plugin.slurm import open_slurm
from slurm_plugin.slurm_text import expand
from slurm_plugin.told import say
from slurm_plugin.trainings import Fingerprint


def take_over(words: Sequence[str]) -> int:
    """Run the srun of a batch script; never returns when it is to be left alone."""
    launch: Launch | None = None
    try:
        adoption = _prepare(words, os.environ)
        if isinstance(adoption, int):
            return adoption
        if adoption is not None:
            with Signals() as signals:
                launch = adoption.start(signals)
                return adoption.follow(launch)
    except Exception as error:
        if launch is not None:
            say(f"this training is not started again after a failure: {error}")
            return launch.only_wait()
        if isinstance(error, arguments.ArgumentError) and "spares=" in str(error):
            say(f"{error}; this srun is not protected")
    return _leave_alone(words)


def _leave_alone(words: Sequence[str]) -> NoReturn:
    """Become srun."""
    try:
        os.execvp("srun", ["srun", *words])
    except OSError as error:
        sys.stderr.write(f"srun: {error.strerror}\n")
        sys.exit(127)


def _prepare(words: Sequence[str], environ: Mapping[str, str]) -> Adoption | int | None:
    """Look at the command line; None when this srun can be none of a training's, 0 for one that is over."""
    options = contract.parse_options(environ.get(contract.ENV_OPTIONS) or environ[contract.ENV_OPTIONS_JOB])
    if options.relaunch == "off" or arguments.foreign(words, environ):
        return None
    job, restarts = job_name(environ)
    options = contract.in_job(options, job)
    known_by = trainings.fingerprint(words, os.getcwd(), environ)
    known = trainings.find(options.dir, job, known_by.cluster)
    lost = sorted({n for t in known if t.restarts == restarts for n in t.lost})
    aside = max(options.spares, len(lost))
    request = arguments.parse(words, environ, aside)
    size = aside > 0 and not arguments.parse(words, environ).nodes
    over = trainings.over(known, restarts, lambda ended: outage.forgot(open_slurm(), say, job, ended))
    name, held = trainings.claim(known, job, known_by, restarts, over)
    if name in over:
        return trainings.leave_over(Journal(options.dir, name, say), restarts)
    line = arguments.as_spoken(request, size, lost, relaunch.VARIABLES)
    return Adoption(line, request, size, options, known_by, name, held)


class Adoption:
    """One srun, from its start to its end.

    Args:
        line: what is started first; request: what the user asked for, for launches after a failure.
        size: the line says the step's size, whatever the environment says.
        name: of the directory, if this is a training; held: the hold on it.
    """

    def __init__(
        self,
        line: Sequence[str],
        request: Request,
        size: bool,
        options: contract.Options,
        known_by: Fingerprint,
        name: str,
        held: Hold,
    ) -> None:
        self._line, self._request, self._size, self._options = line, request, size, options
        self._known_by, self._name, self._hold = known_by, name, held
        directory = os.path.join(options.dir, name)
        self._attempt = next_attempt(read(os.path.join(directory, contract.JOURNAL)), directory)
        self._slurm = open_slurm()
        self._nodes: list[str] = []  # of the ranks, in their order, once one of them has said so
        self._relauncher: Relauncher | None = None
        self._gave_up = False

    def start(self, signals: Signals) -> Launch:
        """Start srun."""
        self._signals = signals
        listener = notice.Listener()
        return Launch(
            self._line,
            self._environ(listener.launcher(self._address())),
            nodes=self._nodes,
            slurm=self._slurm,
            job_id=job_name(os.environ)[0],
            signals=signals,
            listener=listener,
            record=self._record,
            committed=lambda: self._relauncher is not None and self._relauncher.committed(self._attempt),
            reachable=lambda: self._relauncher is None or self._relauncher.reachable(self._nodes),
            patience=self._options.settle + self._options.save,
            say=say,
            training=False,
        )

    def follow(self, launch: Launch) -> int:
        """Return the exit code: of srun, or of the training that it turned out to be."""
        ended = launch.run()
        if self._relauncher is None:
            return 1 if ended.code is None else ended.code
        self._relauncher.note_end(self._attempt, ended)
        return self._relauncher.go_on(self._attempt, ended)

    def _record(self, event: dict[str, Any]) -> None:
        if self._relauncher is None and not self._gave_up:
            try:
                self._relauncher = self._adopt(event)
            except Exception as error:  # whatever it is, the ranks run and srun is waited for
                self._gave_up = True
                say(f"this training is not started again after a failure: {error}")
        if self._relauncher is not None:
            self._relauncher.record(self._attempt, event)

    def _adopt(self, event: Mapping[str, Any]) -> Relauncher:
        """Become its jit-srun: the ranks say where they run, and Slurm what else there is."""
        site = find_site(self._slurm, os.environ, replace(self._request, within=()))
        said = expand(str(event.get("nodes") or ""))
        self._nodes[:] = said if said and set(said) <= set(site.nodes) else site.nodes[: site.need]
        site = replace(site, need=len(self._nodes))
        journal = Journal(self._options.dir, self._name, say)
        relauncher = Relauncher(
            self._slurm, site, self._options, journal, self._signals, self._known_by, master=self._nodes[0]
        )
        self._attempt = relauncher.announce(self._nodes)
        return relauncher

    def _environ(self, launcher: str) -> dict[str, str]:
        environ = {**{name: value for name, (value, _) in contract.NCCL.items()}, **os.environ}
        if self._size:
            for name in relaunch.SIZES:
                environ.pop(name, None)
        trainings.for_ranks(environ, self._attempt, launcher, self._name)
        return environ

    def _address(self) -> str:
        """Return where the ranks reach this machine; Slurm is asked only where the name leads nowhere else."""
        node = os.environ.get("SLURMD_NODENAME") or notice.this_host()
        address = notice.resolve(node)
        if address == node or address.startswith("127.") or address == "::1":
            return self._slurm.node(node).address
        return address
