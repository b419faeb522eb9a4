"""Markers of the reasoning with which a reply begins. Pure."""

Markers = tuple[str, str]

THINK: Markers = ("<think>", "</think>")
# These models are rendered with their own template, which contains the markers. Magistral and Ministral 3 Reasoning
# use the first pair, and MiniMax M3 the last.
OTHER_MARKERS: tuple[Markers, ...] = (
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
)


def markers_in(template: object) -> Markers:
    """Return the markers of the model with this chat template."""
    return next((markers for markers in OTHER_MARKERS if markers[0] in str(template)), THINK)


def split(text: str, markers: Markers, *, opened: bool) -> tuple[str, int | None] | None:
    """Return the reasoning and the position after it, which is None if the reasoning is not closed.

    Return None if the text does not begin with reasoning. `opened`: the prompt contains the opening marker.
    """
    at = len(text) - len(text.lstrip())
    begins = text.startswith(markers[0], at)
    if not begins and not opened:
        return None
    at = at + len(markers[0]) if begins else 0
    reasoning, closed, _ = text[at:].partition(markers[1])
    return reasoning, at + len(reasoning) + len(closed) if closed else None
