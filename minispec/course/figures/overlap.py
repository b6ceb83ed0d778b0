"""Pictures of what runs beside what, and of what each feature changes.

Lanes are SVG text, the same for the same trace; the waterfall is a plot. Knows: how to draw a trace, and counts.
Does not know: what made them, nor what they mean. Used in notebooks 08 (overlap) and 13 (everything on).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from IPython.display import SVG

from minispec.course.figures.base import COLORS, FIX, KEPT, MARGIN, OTHERS, Picture, box, line, svg, text
from minispec.trace import DEVICE, HOST, IDLE, Event, Trace

WIDTH, LEFT, LANE = 880, 80, 26
INK = COLORS["ink"]
LANE_LOOKS = {  # part of a step -> colour of its box and of the words in it
    "plan": (OTHERS[0], INK),
    "choose": ("#E3E3E3", INK),
    "advance": ("#B0B0B0", INK),
    "settle": (OTHERS[1], INK),
    "draft": ("#BBE0F7", INK),
    "forward": (INK, "white"),
    "verify": ("#777777", "white"),
    "copy": ("#D9D2BF", INK),
}


def two_lanes(
    traces: Mapping[str, Trace], window: tuple[float, float], *, unit: str = "ticks", scale: float = 1
) -> SVG:
    """What host and device do, one panel for each trace; the gaps of the device are red and half as high.

    traces: title -> trace. window: (start, end) of what is shown, counted from the first event of each trace, in
    `unit`; a second of the trace's clock is `scale` of them. The number in a box is its step's.
    """
    begin, end = window
    per_unit = (WIDTH - LEFT - MARGIN) / (end - begin)
    parts, y, seen = [], MARGIN, []
    for title, trace in traces.items():
        zero = min((event.start for event in trace.events), default=0.0)
        parts.append(text(MARGIN, y + 4, f"{title}: the device is idle for {trace.idle_share():.0%} of the time", 13))
        for place, lane in enumerate((HOST, DEVICE)):
            top = y + 14 + place * (LANE + 6)
            parts.append(text(MARGIN, top + 18, lane))
            for event in (trace.idle(DEVICE) if lane == DEVICE else []) + trace.lane(lane):
                left, right = (min(max(scale * (t - zero), begin), end) - begin for t in (event.start, event.end))
                if (right - left) * per_unit > 0.1:  # pixels: what takes no time is not drawn
                    seen.append(event.name)
                    parts += _part(event, round(LEFT + left * per_unit, 1), round((right - left) * per_unit, 1), top)
        y += 2 * LANE + 42
    parts += [*_ruler(begin, end, per_unit, y - 14, unit), *_legend(y + 26, seen)]
    return svg(WIDTH, y + 60, parts)


def _part(event: Event, x: float, width: float, top: float) -> Iterator[str]:
    if event.name == IDLE:
        yield box(x, top + LANE / 4, max(width, 1), LANE / 2, FIX, FIX)
        return
    fill, ink = LANE_LOOKS[event.name]
    yield box(x, top, max(width, 1), LANE, fill, "white")
    words = next((w for w in (f"{event.name} {event.step}", f"{event.step}") if 6.6 * len(w) + 4 <= width), "")
    if words:
        yield text(x + width / 2, top + 17, words, 11, fill=ink, more='text-anchor="middle"')


def _ruler(begin: float, end: float, per_unit: float, y: float, unit: str) -> Iterator[str]:
    step = next(step for step in (10**e * m for e in range(9) for m in (1, 2, 5)) if (end - begin) / step <= 12)
    yield line(f"M {LEFT} {y} H {WIDTH - MARGIN}")
    first = -int(-begin // step)
    for tick in range(first * step, int(end) + 1, step):
        x = round(LEFT + (tick - begin) * per_unit, 1)
        yield line(f"M {x:g} {y} v 5")
        yield text(x, y + 18, f"{tick}", 11, more='text-anchor="middle"')
    yield text(MARGIN, y + 18, unit, 11)


def _legend(y: float, seen: list[str]) -> Iterator[str]:
    x = MARGIN
    for name in (*LANE_LOOKS, IDLE):
        if name in seen:
            yield from (
                _part(Event("", name, 0, 0, 0, 0, 0, ()), x, 22, y)
                if name == IDLE
                else [box(x, y, 22, LANE, LANE_LOOKS[name][0], "white")]
            )
            words = "the device waits" if name == IDLE else name
            yield text(x + 30, y + 17, words)
            x += 56 + 8 * len(words)


def waterfall(title: str, panels: Mapping[str, Mapping[str, float]]) -> Picture:
    """What each step of a ladder adds or takes away, one panel for each count.

    panels: name of the count -> (step of the ladder -> value), the same steps in all. The first bar is whole, the
    others show the difference to the step before: blue where it got less, hatched red where it got more.
    """
    picture = Picture(title, columns=len(panels), height=3.4)
    for ax, (name, values) in zip(picture.axes, panels.items(), strict=True):
        before, top = 0.0, max(values.values())
        for place, value in enumerate(values.values()):
            less, first = value <= before, place == 0
            color = COLORS["again"] if first else KEPT if less else FIX
            low, high = sorted((before, value))
            hatch = "" if less or first else "//"
            ax.barh(place, max(high - low, top / 150), left=low, color=color, edgecolor=COLORS["ink"], hatch=hatch)
            ax.text(high + top / 60, place, f"{value:,.3g}" if top < 100 else f"{value:,.0f}", va="center", fontsize=9)
            before = value
        ax.set(title=name, xlim=(0, 1.22 * top), yticks=range(len(values)))
        ax.set_yticklabels(values if ax is picture.axes[0] else [])
        ax.invert_yaxis()
    return picture
