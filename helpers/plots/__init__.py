"""The pictures of the lessons: masks, caches, timelines of rows, latencies, and throughput against latency.

Every function returns a `Picture`, except `play`, which returns a `Player`. A notebook displays both when they are the
last expression of a cell. Both carry a text that describes what they show.
"""

from .charts import bars, grouped_bars, latencies, lines, throughput_latency, tradeoff
from .grids import batches, compare, token_grid, token_row, who_sees_whom
from .load import load_run, load_sweep, request_timeline
from .memory import block_tables, memory_shares, memory_timeline
from .picture import (
    BLUE,
    GRAY,
    GREEN,
    INK,
    ORANGE,
    PALE,
    PURPLE,
    RED,
    REQUEST_COLORS,
    SKY,
    WORK_COLORS,
    WORK_MEANING,
    YELLOW,
    Picture,
)
from .player import Player, play
from .rows import padding, slot_timeline, tokens_read, who_waits, work_bars

__all__ = [
    "BLUE",
    "GRAY",
    "GREEN",
    "INK",
    "ORANGE",
    "PALE",
    "PURPLE",
    "RED",
    "REQUEST_COLORS",
    "SKY",
    "WORK_COLORS",
    "WORK_MEANING",
    "YELLOW",
    "Picture",
    "Player",
    "bars",
    "batches",
    "block_tables",
    "compare",
    "grouped_bars",
    "latencies",
    "lines",
    "load_run",
    "load_sweep",
    "memory_shares",
    "memory_timeline",
    "padding",
    "play",
    "request_timeline",
    "slot_timeline",
    "throughput_latency",
    "token_grid",
    "token_row",
    "tokens_read",
    "tradeoff",
    "who_sees_whom",
    "who_waits",
    "work_bars",
]
