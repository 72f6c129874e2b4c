"""Draw lanes and losses as PNG files. The only module that knows matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from demo.record import Loss
from demo.timeline import Lane, Marks, Span

# What a span means -> its colour (Okabe and Ito's, which colour-blind readers can tell apart, and greys).
COLOURS = {
    "spare": "#f0f0f0",
    "start": "#c8c8c8",
    "training": "#56b4e9",
    "off": "#404040",
    "detect": "#d55e00",
    "settle": "#e69f00",
    "save": "#009e73",
    "commit": "#004d38",
    "relaunch": "#f0e442",
    "restore": "#cc79a7",
    "replay": "#0072b2",
}
MEANING = {
    "spare": "spare node, idle",
    "start": "start",
    "training": "training (a tick: a minibatch's loss)",
    "off": "powered off",
    "detect": "detect: nobody knows yet",
    "settle": "settle: survivors stop where their state is whole",
    "save": "save: survivors write the state",
    "commit": "commit: the checkpoint counts",
    "relaunch": "relaunch: choose nodes, start the step",
    "restore": "restore: import torch, join, read, broadcast",
    "replay": "replay: the interrupted minibatch once more",
}


def draw_timeline(path: Path, marks: Marks, lanes: Sequence[Lane], stages: Sequence[Span], floor_s: float) -> None:
    """Draw what every node did over the run (above) and the stages of the recovery one below the other (below).

    `floor_s` is what a start takes without any failure, drawn below the stages for comparison.
    """
    figure, (top, low) = plt.subplots(
        2, 1, figsize=(12, 8.4), height_ratios=(len(lanes) + 1.2, len(stages) + 1.6), layout="constrained"
    )
    whole = stages[-1].end - marks.failure
    figure.suptitle(
        f"A node loses power; {whole:.1f} s later the interrupted minibatch is done again and training goes on",
        fontsize=13,
    )
    _draw_lanes(top, marks, lanes)
    _draw_stages(low, marks, stages, floor_s)
    shown = [what for what in COLOURS if any(span.what == what for lane in lanes for span in lane.spans)]
    handles = [Patch(facecolor=COLOURS[what], edgecolor="#808080", label=MEANING[what]) for what in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    _save(figure, path)


def _draw_lanes(axes: Any, marks: Marks, lanes: Sequence[Lane]) -> None:
    zero = marks.launched
    for row, lane in enumerate(lanes):
        for span in lane.spans:
            start, length = span.start - zero, span.end - span.start
            axes.barh(row, length, left=start, height=0.7, color=COLOURS[span.what], edgecolor="none")
            if span.label:
                colour = "white" if span.what == "off" else "black"
                axes.text(start + length / 2, row, span.label, ha="center", va="center", fontsize=10, color=colour,
                          bbox={"facecolor": COLOURS[span.what], "edgecolor": "none", "pad": 1.5})  # fmt: skip
        axes.vlines([tick - zero for tick in lane.ticks], row + 0.2, row + 0.35, color="#00000070", linewidth=0.7)
    for when, name, align in ((marks.failure, "failure ", "right"), (marks.replayed, " replayed", "left")):
        axes.axvline(when - zero, color="#d00000" if name.startswith("f") else "#0072b2", linewidth=1.2)
        axes.text(when - zero, -0.62, name, ha=align, va="center", fontsize=10)
    axes.set_yticks(range(len(lanes)), [f"node {lane.node}" for lane in lanes])
    axes.set_ylim(len(lanes) - 0.5, -0.9)
    axes.set_xlim(0, marks.ended - zero)
    axes.set_xlabel("seconds since the job's first launch")
    _plain(axes)


def _draw_stages(axes: Any, marks: Marks, stages: Sequence[Span], floor_s: float) -> None:
    whole = stages[-1].end - marks.failure
    for row, stage in enumerate(stages):
        start, length = stage.start - marks.failure, stage.end - stage.start
        # A stage of milliseconds would be no pixel wide: draw at least a line.
        axes.barh(row, max(length, whole / 500), left=start, height=0.7, color=COLOURS[stage.what])
        axes.axvline(start + length, color="#00000018", linewidth=0.8, zorder=0)
        text = f"{length:.2f} s" if length >= 0.1 else f"{length * 1000:.1f} ms"
        if length > whole / 10:
            colour = "black" if stage.what in ("relaunch", "settle") else "white"
            axes.text(start + length / 2, row, text, va="center", ha="center", fontsize=10, color=colour)
        else:
            axes.text(start + length + whole / 100, row, text, va="center", fontsize=10)
    start = marks.relaunched - marks.failure
    axes.barh(len(stages), floor_s, left=start, height=0.7, facecolor="none", edgecolor="#808080", linestyle="--")
    text = f"{floor_s:.2f} s from launch to first update, no failure"
    axes.text(start + floor_s / 2, len(stages), text, va="center", ha="center", fontsize=10)
    axes.set_yticks(range(len(stages) + 1), [*(stage.what for stage in stages), "a bare start"])
    axes.set_ylim(len(stages) + 0.5, -0.5)
    axes.set_xlim(0, whole * 1.08)
    axes.set_xlabel("the recovery: seconds since the failure")
    _plain(axes)


def draw_loss(path: Path, calm: Mapping[int, Sequence[Loss]], rough: Mapping[int, Sequence[Loss]], minibatch: int,
              equal: bool) -> None:  # fmt: skip
    """Draw the mean loss of the ranks over minibatches, both runs over each other; the failure hit `minibatch`."""
    figure, axes = plt.subplots(figsize=(10, 5), layout="constrained")
    x, y = mean_losses(calm)
    axes.plot(x, y, color="#a8d8f0", linewidth=7, solid_capstyle="round", label="without a failure")
    x, y = mean_losses(rough)
    axes.plot(x, y, color="#d55e00", linewidth=1.4, marker=".", markersize=4, label="with a node powered off")
    axes.axvline(minibatch, color="#d00000", linewidth=1.0, linestyle="--")
    axes.annotate(f"node powered off in minibatch {minibatch};\nonly this one is done again", (minibatch, max(y)),
                  xytext=(8, -4), textcoords="offset points", va="top", fontsize=10)  # fmt: skip
    same = "every loss of every rank is bitwise equal" if equal else "the losses or parameters DIFFER"
    axes.set_title(f"Training loss with and without a failure: {same}")
    axes.set_xlabel("minibatch")
    axes.set_ylabel("loss, mean of the ranks (nats a byte)")
    axes.legend(frameon=False)
    _plain(axes)
    _save(figure, path)


def mean_losses(losses: Mapping[int, Sequence[Loss]]) -> tuple[list[int], list[float]]:
    """Return the minibatches and the mean over ranks of what each logged last for it."""
    last = [{line.minibatch: float.fromhex(line.loss) for line in lines} for lines in losses.values()]
    minibatches = sorted(set().union(*last))
    found = [[one[m] for one in last if m in one] for m in minibatches]
    return minibatches, [sum(values) / len(values) for values in found]


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
