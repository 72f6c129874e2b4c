"""Every error the runtime raises.

    JitError
    ├── ConfigError        the environment or options cannot be used
    ├── BootstrapError     the ranks did not become one world
    ├── AttachError        the training objects cannot be protected
    ├── WireError          a control-plane frame or connection is not ours
    ├── NotCoveredError    no minibatch has an intact holder for every shard
    ├── SaveError          the state could not be written
    ├── ClaimedError       another side of a cut network committed this attempt first
    ├── DamagedError       a checkpoint is incomplete or its checksums differ
    └── MismatchError      a checkpoint belongs to another model or world

A message says what happened, to what, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Mapping


class JitError(Exception):
    """Base of all errors of this package."""


class ConfigError(JitError):
    """The environment or the options cannot be used."""


class BootstrapError(JitError):
    """The ranks did not become one world."""


class AttachError(JitError):
    """The training objects cannot be protected."""


class WireError(JitError):
    """A frame or a connection of the control plane is not ours."""


class NotCoveredError(JitError):
    """No minibatch has an intact holder for every shard; nothing may be saved."""

    def __init__(self, shards: int, held: Mapping[int, set[int]]) -> None:
        self.shards = shards
        self.held = dict(held)
        have = ", ".join(f"minibatch {m}: shards {sorted(s)}" for m, s in sorted(self.held.items())) or "none"
        super().__init__(f"no minibatch is held intact for all {shards} shard(s) (held: {have}); nothing can be saved")


class SaveError(JitError):
    """The state could not be written."""


class ClaimedError(SaveError):
    """Another side of a cut network committed this attempt first."""


class DamagedError(JitError):
    """A checkpoint is incomplete or its checksums differ."""


class MismatchError(JitError):
    """A checkpoint belongs to another model or another world size."""
