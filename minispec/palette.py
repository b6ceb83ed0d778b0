"""What each kind of output token looks like, on paper and in a terminal: one place for the demo and all notebooks.

The colours are of Okabe and Ito's palette (2008), which colour-blind readers can tell apart; the lightness falls and
the hatching differs too, so a grey print can be read. In a terminal every kind has its own mix of bold and underline.

Knows: token kinds. Does not know: matplotlib, terminals, who draws. Used from notebook 00 (the map) on.
"""

from __future__ import annotations

from minispec.core import TokenKind

KIND_COLORS = {
    TokenKind.PLAIN: "#CFCFCF",
    TokenKind.ACCEPTED: "#0072B2",
    TokenKind.CORRECTED: "#D55E00",
    TokenKind.BONUS: "#F0E442",
}
KIND_HATCHES = {
    TokenKind.PLAIN: "",
    TokenKind.ACCEPTED: "",
    TokenKind.CORRECTED: "////",
    TokenKind.BONUS: "....",
}
KIND_LABELS = {
    TokenKind.PLAIN: "plain: no guess",
    TokenKind.ACCEPTED: "accepted: guess kept",
    TokenKind.CORRECTED: "corrected: guess replaced",
    TokenKind.BONUS: "bonus: after a draft kept whole",
}
# Codes of ANSI SGR sequences: (attributes, colour); the attributes alone tell the kinds apart.
KIND_ANSI = {
    TokenKind.PLAIN: ("", ""),
    TokenKind.ACCEPTED: ("1", "36"),  # bold, cyan
    TokenKind.CORRECTED: ("4", "33"),  # underlined, yellow
    TokenKind.BONUS: ("1;4", "35"),  # bold and underlined, magenta
}
RUN_COLORS = {"plain": "#7F7F7F", "speculating": "#0072B2"}
