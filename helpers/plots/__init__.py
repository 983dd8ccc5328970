"""The pictures of the lessons: maps, masks, caches, timelines of rows, latencies, and latency against throughput.

Every function returns a `Picture`, except `play` and `flip_book`, which return pictures that move. A notebook displays
them when they are the last expression of a cell. All carry a text that describes what they show. A `title` says in a
sentence what the picture shows.
"""

import inspect

from . import style
from .charts import bars, lines, throughput_latency
from .colors import BLUE, GRAY, INK, ORANGE, PURPLE, REQUEST_COLORS, SKY
from .drawings import (
    attention_step,
    block_lookup,
    block_lookup_steps,
    cache_growth_steps,
    merged_and_adapted,
    padded_and_ragged,
    separate_phases,
    shared_pass,
    static_and_continuous,
    token_budget,
)
from .grids import batches, compare, token_grid, token_row, visible_keys
from .life_of_a_request import life_of_a_request
from .load_results import load_run, request_timeline
from .memory import block_tables, memory_shares, memory_timeline
from .picture import Picture
from .player import flip_book, play
from .replicas import prefix_map, replica_work, resumed_streams, routed_fleet, virtual_clock
from .rounding import activation_map, agreement, rounding_levels, weight_path
from .rows import slot_timeline, tokens_read, waiting_requests
from .split_model import pass_shares, split_block
from .system_map import system_map
from .token_choices import constrained_text, probability_strips, tokens_over_states
from .verified_drafts import draft_staircase, verified_draft

globals().update({name: style.styled(draw) for name, draw in globals().items() if inspect.isfunction(draw)})
