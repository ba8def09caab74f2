#!/usr/bin/env python3
"""Draws registry/<op>/figures.json as registry/<op>/figures.svg: groups of horizontal bars, one colour a series.

  tools/bench/plot.py [--check] [OP...]      (default: every op that has figures)

--check writes nothing and fails if a picture is not what its figures give. Needs Python and nothing else.

figures.json: {"title": ..., "axis": ..., "reference": 1.0 or null, "series": ["forward", ...],
               "groups": [["(8, 4096, 16)", [3.0, ...]], ...]}
"""
import json
import pathlib
import sys

COLOURS = ["#2f6f9f", "#c8553d", "#5a8f5a", "#8a6d3b"]
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


def main(words):
    if "-h" in words or "--help" in words:
        return print(__doc__)
    check = "--check" in words
    ops = [word for word in words if word != "--check"]
    registry = pathlib.Path(__file__).resolve().parents[2] / "registry"
    sources = [registry / op / "figures.json" for op in ops] or sorted(registry.glob("*/figures.json"))
    stale = []
    for source in sources:
        drawn = picture(json.loads(source.read_text()))
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
