"""The pictures of the course, in one visual language.

One colour has one meaning in every notebook (`COLORS` here, kinds of tokens in `minispec.palette`; both from the
palette of Okabe and Ito, safe for colour blindness). In greyscale the meanings differ in lightness, border or place.
Plots are PNG. Drawings are SVG text, the same on every machine, so notebook tests compare them letter by letter.

Knows: how to draw numbers that the caller took from the engine. Does not know: how to get them. Used from notebook 00
(the map) on.
"""

from minispec.course.figures.base import COLORS, FIX, KEPT, OTHERS, STYLE, Picture
from minispec.course.figures.controller import REASON_LOOKS, controller
from minispec.course.figures.drawings import SLOT_LOOKS, STAGES, draft_tree, request_map, slots, token_strip
from minispec.course.figures.overlap import LANE_LOOKS, two_lanes, waterfall
from minispec.course.figures.plots import bars, break_even, forwards, heat_maps, overlap, roofline, token_bytes, work
from minispec.course.figures.radix import TREE_LOOKS, TreeFilm, hit_rates
from minispec.course.figures.scheduling import GANTT_LOOKS, budget, gantt, pages, trade
