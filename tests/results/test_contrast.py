"""Contrast of the report's text, computed from its stylesheet."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rollout_backend.results.page.templating import environment

LEAST = 4.5  # of WCAG 2.2, AA
ON_SURFACES = [(text, surface) for text in ("ink", "mut", "acc", "good", "bad") for surface in ("bg", "card")]
PAIRS = [*ON_SURFACES, ("good", "good-bg"), ("bad", "bad-bg"), ("code-ink", "code"), ("ink", "code"), ("acc", "code")]
TOKENS = [("ink", "p0"), ("ink", "p1"), ("ink", "p2")]


def stylesheet() -> str:
    engine = environment()
    text = engine.get_template("base.html").render()
    return text[text.index("<style>") : text.index("</style>")]


def themes(css: str) -> Iterator[dict[str, str]]:
    """Yield the colors of the light and of the dark theme."""
    for theme in re.findall(r"color-scheme:(?:light|dark);([^}]*)", css)[:2]:
        yield dict(re.findall(r"--([\w-]+):([^;]+);", theme))


def luminance(color: str) -> float:
    if color.startswith("rgb"):
        parts = [int(part) for part in re.findall(r"\d+", color)]
    else:
        digits = color.removeprefix("#")
        digits = "".join(digit * 2 for digit in digits) if len(digits) == 3 else digits
        parts = [int(digits[i : i + 2], 16) for i in (0, 2, 4)]
    linear = [p / 12.92 if (p := part / 255) <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_has_enough_contrast_in_both_themes():
    css = stylesheet()
    found = [*themes(css)]
    assert len(found) == 2
    for colors in found:

        def value(color: str, colors: dict[str, str] = colors) -> str:
            variable = re.fullmatch(r"var\(--([\w-]+)\)", color)
            return colors[variable[1]] if variable else color

        measured = {pair: contrast(*(colors[name] for name in pair)) for pair in (*PAIRS, *TOKENS)}
        pre = re.search(r"pre\{[^}]*?background:([^;]+);color:([^;]+);", css)
        measured["pre"] = contrast(value(pre[1]), value(pre[2]))
        bars: dict[str, str] = {}
        own_color: dict[str, str] = {}
        for selectors, body in re.findall(r"([^{}]+)\{([^{}]*)\}", css):
            style = dict(re.findall(r"(background|color):([^;!}]+)", body))
            for bar in re.findall(r"\.(bg-\w+)", selectors):
                if "background" in style:
                    bars[bar] = style["background"]
                if "color" in style:
                    own_color[bar] = style["color"]
        assert len(bars) > 15
        for bar, background in bars.items():
            if not re.fullmatch(r"bg-(k\d|between)", bar):  # of legends, without text in them
                measured[bar] = contrast(value(own_color.get(bar, "var(--bar-ink)")), value(background))
        assert {name: round(ratio, 2) for name, ratio in measured.items() if ratio < LEAST} == {}
    assert "opacity" not in re.search(r"\.ax\.flat\{([^}]*)", css)[1]  # it would lower the contrast of text
