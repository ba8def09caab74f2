#!/usr/bin/env python3
"""Draws registry/<op>/figures.json as registry/<op>/figures.svg: groups of horizontal bars, one colour a series; and
lengths.json, which a bench leaves, as lengths.svg: speed over length, one colour a kernel.

  tools/bench/plot.py [--check] [OP...]      (default: every op that has figures)

--check writes nothing and fails if a picture is not what its figures give. Needs Python and nothing else.

figures.json: {"title": ..., "axis": ..., "reference": 1.0 or null, "series": ["forward", ...],
               "groups": [["(8, 4096, 16)", [3.0, ...]], ...]}
"""
import json
import math
import pathlib
import sys

COLOURS = ["#2f6f9f", "#c8553d", "#5a8f5a", "#8a6d3b", "#7a5c99"]
BAR, GAP, WIDTH, TOP = 14, 12, 460, 46


def text(x, y, words, anchor="start", size=12, fill="#333"):
    words = str(words).replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{words}</text>'


def picture(figures):
    series, groups = figures["series"], figures["groups"]
    most = max(value for _, values in groups for value in values)
    scale = WIDTH / (most * 1.05)
    left = max(170, 16 + max(6 * len(name) for name, _ in groups))
    group_height = BAR * len(series) + GAP
    bottom = TOP + 20 + group_height * len(groups)
    out = [text(10, 20, figures["title"], size=14)]
    x = left
    for name, colour in zip(series, COLOURS):
        out.append(f'<rect x="{x}" y="32" width="10" height="10" fill="{colour}"/>')
        out.append(text(x + 14, 41, name))
        x += 24 + 7 * len(name)
    for g, (name, values) in enumerate(groups):
        y = TOP + 10 + g * group_height
        out.append(text(left - 8, y + BAR * len(series) / 2 + 4, name, "end"))
        for value, colour in zip(values, COLOURS):
            out.append(f'<rect x="{left}" y="{y}" width="{value * scale:.1f}" height="{BAR - 2}" fill="{colour}"/>')
            out.append(text(left + value * scale + 4, y + BAR - 4, f"{value:g}", size=11))
            y += BAR
    reference = figures.get("reference")
    if reference is not None:
        at = left + reference * scale
        out.append(f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{bottom - 16}" stroke="#333" stroke-dasharray="3 3"/>')
    out.append(text(left, bottom, figures["axis"], size=11, fill="#666"))
    size = f'width="{left + WIDTH + 60}" height="{bottom + 12}"'
    body = "\n".join(out)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">\n'
            f'<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n')


def panel(what, times, work, colours, x0, width=330, height=230, top=70):
    """Speed over length, on a scale of powers of two."""
    unit = "TB/s" if what == "decode" else "TFLOP/s"
    points = {}
    for length, row in times.items():
        for name, us in row.items():
            points.setdefault(name, []).append((int(length), work[length] / us * 1e6))
    lengths = [int(length) for length in times]
    most = max(speed for line in points.values() for _, speed in line)
    step = next(s for s in (0.5, 1, 2, 5, 10, 20, 50, 100, 200) if most / s < 8)
    low, span = math.log2(min(lengths)), math.log2(max(lengths) / min(lengths))
    place = lambda length, speed: (x0 + (math.log2(length) - low) / span * width,  # noqa: E731
                                   top + height * (1 - speed / (most * 1.05)))
    out = [text(x0, top - 12, f"{what}, {unit}", size=13)]
    for i in range(int(most * 1.05 / step) + 1):
        y = place(lengths[0], i * step)[1]
        out.append(f'<line x1="{x0}" y1="{y:.1f}" x2="{x0 + width}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(text(x0 - 6, y + 4, f"{i * step:g}", "end", 10, "#666"))
    for length in (n for n in lengths if n & (n - 1) == 0):
        out.append(text(place(length, 0)[0], top + height + 16, f"{length // 1024}k" if length >= 1024 else length, "middle", 10, "#666"))
    for name, line in points.items():
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line))
        thick = 2.5 if name == "rlk" else 1.3
        out.append(f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="{thick}"/>')
    return out


def lengths(figures):
    names = sorted({name for rows in figures["us"].values() for row in rows.values() for name in row}, key=lambda n: (n != "rlk", n))
    colours = dict(zip(names, COLOURS))
    out, x = [text(10, 20, figures["title"], size=14)], 50
    for name in names:
        out.append(f'<rect x="{x}" y="30" width="10" height="10" fill="{colours[name]}"/>')
        out.append(text(x + 14, 39, name))
        x += 34 + 7 * len(name)
    for i, (what, times) in enumerate(figures["us"].items()):
        out += panel(what, times, figures["work"][what], colours, 50 + 390 * i)
    body = "\n".join(out)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{30 + 390 * len(figures["us"])}" height="330" font-family="sans-serif">\n'
            f'<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n')


def main(words):
    if "-h" in words or "--help" in words:
        return print(__doc__)
    check = "--check" in words
    ops = [word for word in words if word != "--check"]
    registry = pathlib.Path(__file__).resolve().parents[2] / "registry"
    sources = [source for op in ops or ["*"] for name in ("figures", "lengths") for source in sorted(registry.glob(f"{op}/{name}.json"))]
    stale = []
    for source in sources:
        drawn = (picture if source.stem == "figures" else lengths)(json.loads(source.read_text()))
        target = source.with_suffix(".svg")
        if check:
            if not target.exists() or target.read_text() != drawn:
                stale.append(str(target.relative_to(registry.parent)))
        else:
            target.write_text(drawn)
            print(target.relative_to(registry.parent))
    if stale:
        sys.exit("not what the figures give: " + ", ".join(stale) + "; run tools/bench/plot.py")


if __name__ == "__main__":
    main(sys.argv[1:])
