"""Line charts as inline SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 340, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 28, 30
"""margins around the plotted area (px)"""
COLORS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df")

Points = Sequence[tuple[int, float]]


def curve(title: str, lines: Mapping[str, Points]) -> str:
    """One frame with a line per entry; values that are not finite leave a gap.

    Args:
        lines: label -> [(step, value)], each in step order.
    """
    finite = [(x, y) for points in lines.values() for x, y in points if math.isfinite(y)]
    if not finite:
        return ""
    x_low, x_high = min(x for x, _ in finite), max(x for x, _ in finite)
    y_low, y_high = _widen(min(y for _, y in finite), max(y for _, y in finite))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        up = (y - y_low) / (y_high - y_low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    drawn = []
    for number, (label, points) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        for part in _unbroken(points):
            if len(part) == 1:
                x, y = place(*part[0])
                drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>')
            coords = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*p) for p in part))
            drawn.append(f'<polyline points="{coords}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        drawn.append(_text(WIDTH - RIGHT, TOP - 2 - 11 * (len(lines) - 1 - number), f"{label}", "end", color))
    return "".join([_frame(title, len(lines)), *_axes((x_low, x_high), (y_low, y_high)), *drawn, "</svg>"])


def _widen(low: float, high: float) -> tuple[float, float]:
    """A constant line lies in the middle of its frame."""
    if high > low:
        return low, high
    margin = abs(low) * 0.1 or 1.0
    return low - margin, high + margin


def _unbroken(points: Points) -> list[list[tuple[int, float]]]:
    """Stretches of finite values."""
    parts: list[list[tuple[int, float]]] = [[]]
    for x, y in points:
        if math.isfinite(y):
            parts[-1].append((x, y))
        elif parts[-1]:
            parts.append([])
    return [p for p in parts if p]


def _frame(title: str, lines: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 -{11 * lines} {WIDTH} {HEIGHT + 11 * lines}" font-family="sans-serif" font-size="10" role="img">'
        f"<title>{html.escape(title)}</title>"
        f'<text x="0" y="2" font-size="12" font-weight="bold">{html.escape(title)}</text>'
    )


def _axes(x_range: tuple[int, int], y_range: tuple[float, float]) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    return [
        f'<path d="M{LEFT},{TOP} V{bottom} H{right}" fill="none" stroke="#999"/>',
        _text(LEFT - 4, TOP + 8, f"{y_range[1]:.3g}", "end"),
        _text(LEFT - 4, bottom, f"{y_range[0]:.3g}", "end"),
        _text(LEFT, bottom + 13, str(x_range[0]), "start"),
        _text(right, bottom + 13, f"step {x_range[1]}", "end"),
    ]


def _text(x: float, y: float, text: str, anchor: str, color: str = "#555") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{html.escape(text)}</text>'
