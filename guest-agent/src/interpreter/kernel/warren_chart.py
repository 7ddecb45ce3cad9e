"""What a figure shows, as data: lines, points, bars, pies and boxes."""

import datetime
import re

_UNIT = re.compile(r"\s\((.*?)\)|\[(.*?)\]")


def describe(figure):
    axes = figure.get_axes()
    if not axes:
        return None
    charts = [_chart(axis) for axis in axes]
    if len(charts) == 1:
        return charts[0]
    title = figure._suptitle.get_text() if figure._suptitle else None
    return {"type": "superchart", "title": title or None, "elements": charts}


def _chart(axis):
    from matplotlib.collections import PathCollection
    from matplotlib.lines import Line2D
    from matplotlib.patches import PathPatch, Rectangle, Wedge
    from matplotlib.text import Text

    drawn = [each for each in axis._children if not isinstance(each, Text)]
    chart = {"type": "unknown", "title": axis.get_title() or None, "elements": []}

    def only(*kinds):
        return bool(drawn) and all(isinstance(each, kinds) for each in drawn)

    if only(Line2D):
        chart["type"] = "line"
        chart["elements"] = [
            _points(line.get_label(), zip(line.get_xdata(), line.get_ydata()))
            for line in axis.get_lines()
        ]
        return {**chart, **_labels(axis), **_ticks(axis)}
    if only(PathCollection):
        chart["type"] = "scatter"
        chart["elements"] = [
            _points(points.get_label(), points.get_offsets()) for points in axis.collections
        ]
        return {**chart, **_labels(axis), **_ticks(axis)}
    if only(Wedge):
        chart["type"] = "pie"
        chart["elements"] = [
            {
                "label": wedge.get_label(),
                "angle": abs(round(float(wedge.theta2 - wedge.theta1), 4)),
                "radius": float(wedge.r),
            }
            for wedge in axis.patches
        ]
        return chart
    if only(Rectangle):
        chart["type"] = "bar"
        labels = _labels(axis)
        chart["elements"], swapped = _bars(axis)
        return {**chart, **(_swap(labels) if swapped else labels)}
    if only(PathPatch, Line2D):
        chart["type"] = "box_and_whisker"
        labels = _labels(axis)
        chart["elements"] = _boxes(axis)
        return {**chart, **labels}
    return chart


def _labels(axis):
    labels = {}
    for name, text in (("x", axis.get_xlabel()), ("y", axis.get_ylabel())):
        match = _UNIT.search(text or "")
        labels[f"{name}_label"] = text or None
        labels[f"{name}_unit"] = (match[1] or match[2]) if match else None
    return labels


def _swap(labels):
    other = {"x": "y", "y": "x"}
    return {other[name[0]] + name[1:]: value for name, value in labels.items()}


def _ticks(axis):
    ticks = {}
    for name, line in (("x", axis.xaxis), ("y", axis.yaxis)):
        ticks[f"{name}_ticks"] = [_plain(tick) for tick in line.get_ticklocs()]
        ticks[f"{name}_tick_labels"] = [label.get_text() for label in line.get_ticklabels()]
        scale = line.get_scale()
        kinds = {"log": "log", "symlog": "symlog", "logit": "logit"}
        ticks[f"{name}_scale"] = kinds.get(scale, "linear")
    return ticks


def _points(label, points):
    return {"label": str(label), "points": [(_plain(x), _plain(y)) for x, y in points]}


def _bars(axis):
    bars, swapped = [], False
    for container in axis.containers:
        rectangles = list(container)
        group = str(container.get_label())
        heights = [each.get_height() for each in rectangles]
        swapped = len(heights) > 1 and len(set(heights)) == 1 and any(
            each.get_width() != rectangles[0].get_width() for each in rectangles
        )
        line = axis.yaxis if swapped else axis.xaxis
        labels = [label.get_text() for label in line.get_ticklabels()]
        values = [each.get_width() for each in rectangles] if swapped else heights
        for label, value in zip(labels, values):
            bars.append({"label": label, "group": group, "value": _plain(value)})
    return bars, swapped


def _boxes(axis):
    labels = [label.get_text() for label in axis.get_xticklabels()]
    boxes = []
    for patch, label in zip(axis.patches, labels + [""] * len(axis.patches)):
        corners = patch.get_path().vertices
        low, high = corners[:, 1].min(), corners[:, 1].max()
        left, right = corners[:, 0].min(), corners[:, 0].max()
        box = {
            "label": label or str(patch.get_label()),
            "min": _plain(low),
            "first_quartile": _plain(low),
            "median": None,
            "third_quartile": _plain(high),
            "max": _plain(high),
            "outliers": [],
        }
        for line in axis.lines:
            xs, ys = line.get_xdata(), line.get_ydata()
            if len(xs) != 2 or not left <= min(xs) <= max(xs) <= right:
                continue
            if ys[0] == ys[1] and low <= ys[0] <= high:
                box["median"] = _plain(ys[0])
            elif max(ys) == low:
                box["min"] = _plain(min(ys))
            elif min(ys) == high:
                box["max"] = _plain(max(ys))
        boxes.append(box)
    return boxes


def _plain(value):
    if isinstance(value, (datetime.date, datetime.datetime)):
        return value.isoformat()
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    return str(value)
