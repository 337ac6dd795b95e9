"""Draws docs/picture.png, the method in one picture: python docs/picture.py"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

COLORS, HEADS, TOKENS = ("#3b6ea5", "#c1652d"), 8, 60
STAGES = (
    ("01", "calibration/", "statistics of\nall heads"),
    ("02", "similarity/", "alike, once\nturned?"),
    ("03", "groups/", "who will\nshare"),
    ("04", "aligned/", "turned: the\nsame function"),
    ("04", "merged/", "shared,\nuntrained"),
    ("05", "train/", "distilled, each\nhead by a mask"),
    ("06", "gqa/", "a stock\ncheckpoint"),
    ("07", "eval/", "tasks, KL,\nbytes, speed"),
)


def turned(points: np.ndarray, degrees: float) -> np.ndarray:
    """Points [n, 2] after a rotation."""
    angle = np.radians(degrees)
    return points @ np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])


def draw_cloud(figure, place: tuple, points: np.ndarray, color: str, name: str) -> None:
    """A head's vectors [n, 2] of one calibration text, in a square at `place` (left, bottom, size)."""
    left, bottom, size = place
    axes = figure.add_axes((left, bottom, size * 0.36, size))  # a figure of 12.5 x 4.5 inches
    axes.scatter(*points.T, s=3, color=color, linewidths=0)
    axes.set(xlim=(-3.3, 3.3), ylim=(-3.3, 3.3), xticks=[], yticks=[])
    axes.set_title(name, fontsize=8, pad=2)
    for spine in axes.spines.values():
        spine.set_color("#bbbbbb")


def main() -> None:
    random = np.random.default_rng(0)
    shapes = [np.stack([random.normal(0, 1.1, TOKENS), random.normal(0, 0.35, TOKENS)], 1) for _ in COLORS]
    shapes[1][:, 1] += 0.5 * shapes[1][:, 0] ** 2 - 0.6  # the two groups differ in more than a rotation
    group = random.permutation([0] * 4 + [1] * 4)
    angles = random.uniform(0, 360, HEADS)
    heads = [shapes[kind] + random.normal(0, 0.2, (TOKENS, 2)) for kind in group]
    figure = plt.figure(figsize=(12.5, 4.5), dpi=110)
    columns = ((0.01, "8 heads: they look different"), (0.37, "turned, which changes nothing: alike"),
               (0.73, "4 share 1: a cache of a quarter"))
    for left, title in columns:
        figure.text(left, 0.94, title, fontsize=11, weight="bold")
    order = sorted(range(HEADS), key=lambda head: (group[head], head))
    for place, (before, after) in enumerate(zip(range(HEADS), order, strict=True)):
        row, column = 1 - place // 4, place % 4
        spot = (0.01 + 0.075 * column, 0.36 + 0.28 * row, 0.2)
        draw_cloud(figure, spot, turned(heads[before], angles[before]), COLORS[group[before]],
                   f"head {before + 1}")
        draw_cloud(figure, (spot[0] + 0.36, *spot[1:]), heads[after], COLORS[group[after]],
                   f"head {after + 1}")
    for kind, color in enumerate(COLORS):
        mean = np.mean([heads[head] for head in range(HEADS) if group[head] == kind], 0)
        draw_cloud(figure, (0.78, 0.64 - 0.28 * kind, 0.2), mean, color, f"kv head {kind + 1}")
    for left in (0.315, 0.69):
        figure.text(left, 0.6, "→", fontsize=26)
    for number, (stage, name, words) in enumerate(STAGES):
        left = 0.01 + 0.124 * number
        figure.text(left, 0.2, f"{stage}  {name}", fontsize=10, weight="bold", family="monospace",
                    bbox={"boxstyle": "round", "facecolor": "#eeeeee", "edgecolor": "#bbbbbb"})
        figure.text(left, 0.075, words, fontsize=9)
    figure.savefig(Path(__file__).with_name("picture.png"))


if __name__ == "__main__":
    main()
