"""Drawings that explain an idea before its code: nothing in them is measured, and everything in them is counted."""

import re
from collections.abc import Sequence

from matplotlib.patches import ConnectionPatch

from ..trace import WORK, RowStep, Trace, TracedPass
from .colors import BLUE, GRAY, INK, LIGHT_SKY, LINE, ORANGE, PAGE, REQUEST_COLORS, SKY, SMALL, ink_on, shade, wasted
from .grids import draw_cell, set_up_grid
from .picture import Picture, add_key, draw_box, new_figure, set_panel_title, write
from .player import FlipBook
from .rows import slot_timeline

# How much of each token's value the newest one, the last, takes in. The shares are made up.
SHARES = dict(The=0.04, quick=0.08, brown=0.09, fox=0.31, jumped=0.16, over=0.06, the=0.11, lazy=0.15)


def attention_step(title: str = "") -> Picture:
    """Draw how the newest token of a text attends to all of its tokens, and what of that the KV cache holds."""
    figure, (ax,) = new_figure(4.0, title=title)
    last, most = len(SHARES) - 1, max(SHARES.values())
    for x, (token, share) in enumerate(SHARES.items()):
        strength, line = share / most, {"color": INK, "linewidth": 0.5 + 4.5 * share / most, "alpha": 0.45}
        write(ax, x + 0.5, 0.3, token, weight="bold" if x == last else "normal")
        ax.plot((last + 0.5, x + 0.5), (1.52, 2.26), **line)
        for y in (2.2, 4.4):
            draw_cell(ax, x, y, SKY if x == last else LIGHT_SKY)
        write(ax, x + 0.5, 3.3, f"{share:.0%}", SMALL)
        draw_box(ax, x + 0.3, 4.1 - 0.62 * strength, 0.4, 0.62 * strength, INK, linewidth=0.7)
        ax.plot((x + 0.5, last + 0.5), (5.36, 6.14), **line)
    for y in (0.6, 6.1):
        draw_cell(ax, last, y, PAGE, framed=True)
    ax.text(last - 0.1, 6.58, "the rest of the pass, then the next token: dog", ha="right", va="center")
    set_up_grid(ax, len(SHARES), 7.15, "")
    ax.set_yticks([1.06, 2.66, 3.7, 4.86, 6.56], ["query", "keys", "shares", "values", "sum"], fontsize="medium")
    key = {
        "read from the KV cache": LIGHT_SKY,
        "computed and kept": SKY,
        "computed, not kept": {"facecolor": PAGE, "edgecolor": INK, "linewidth": 1.6},
    }
    add_key(figure, key)
    listed = ", ".join(f"{token} {share:.0%}" for token, share in SHARES.items())
    alt = (
        f"One step of attention over {len(SHARES)} tokens. The query of the newest one, lazy, is compared with the "
        f"keys of all. The better a key matches, the more of its token's value is taken in: {listed}. The sum leads "
        f"to the next token, dog. The cache holds {last} of the {len(SHARES)} keys and values."
    )
    return Picture(figure, alt)


def _with_and_without_cache(prompt_tokens: int, passes: int, drawn: int) -> Picture:
    """Draw which tokens each of the first `drawn` forward passes computes, without and with a KV cache."""
    panels = {
        "without a cache, each later pass computes every token again": False,
        "with a cache, each later pass computes only the new token": True,
    }
    width = prompt_tokens + passes - 1
    figure, axes = new_figure(0.34 * passes * 2 + 1.5, 2)
    totals = []
    for ax, (name, cache) in zip(axes, panels.items(), strict=True):
        totals.append(0)
        for y in range(drawn):
            length = prompt_tokens + y
            known = length - 1 if y else 0  # an earlier pass has computed these
            for x in range(length):
                look = {"color": SKY} if x >= known else {"color": LIGHT_SKY} if cache else wasted(shade(SKY))
                draw_box(ax, x + 0.04, y + 0.06, 0.92, 0.88, **look)
            computed = length - known if cache else length
            totals[-1] += computed
            ax.text(width + 0.2, y + 0.5, f"computes {computed}", va="center")
        set_up_grid(ax, width + 2.4, passes, name, [f"pass {y + 1}" for y in range(passes)])
    add_key(figure, {"computed": SKY, "computed again": wasted(shade(SKY)), "read from the cache": LIGHT_SKY})
    alt = (
        f"A grid with a row per forward pass and a column per token, for a prompt of {prompt_tokens} tokens. Computed "
        f"so far: {totals[0]} tokens without a cache; {totals[1]} with one, from which each new token reads the others."
    )
    return Picture(figure, alt)


def cache_growth_steps(prompt_tokens: int = 7, passes: int = 4) -> FlipBook:
    """Return a flip book of the tokens that each forward pass of a request computes, without and with a KV cache."""
    captions = [f"Pass 1 computes the prompt's {prompt_tokens} tokens. With a cache, their keys and values are kept."]
    for number in range(2, passes + 1):
        tokens = prompt_tokens + number - 1
        captions.append(
            f"Pass {number}: without a cache, all {tokens} tokens are computed. With a cache, only the new token is "
            f"computed. It reads the keys and values of the other {tokens - 1}."
        )
    pictures = [_with_and_without_cache(prompt_tokens, passes, drawn) for drawn in range(1, passes + 1)]
    return FlipBook(pictures, captions, "The cache grows by a token per pass")


def shared_pass() -> Picture:
    """Draw that requests which share a forward pass share one reading of the weights, an equal box in all passes."""
    figure, axes = new_figure(3.5, 2)
    requests = range(4)
    for ax, passes, reads in (
        (axes[0], [[row] for row in requests], "4 forward passes read all weights 4 times"),
        (axes[1], [list(requests)], "1 forward pass reads all weights once"),
    ):
        set_up_grid(ax, 4, 4, f"{reads}, for 4 new tokens", [f"request {row}" for row in requests])
        _draw_passes(ax, [("all\nweights", rows) for rows in passes], 4, 1)
    alt = (
        "Two drawings of 4 requests that each get a token. Alone, 4 forward passes read the weights 4 times. In one "
        "batch, one forward pass reads the weights once for all of them."
    )
    return Picture(figure, alt)


def _draw_passes(ax, passes: Sequence[tuple[str, Sequence[int]]], height: int, width: float) -> None:
    """Draw passes side by side: a box of the weights that each reads, and the requests that it serves."""
    for x, (weights, rows) in enumerate(passes):
        _draw_weights(ax, x * width, 0.66 * width, height, weights, GRAY)
        for row in rows:
            _draw_request(ax, (x + 0.69) * width, row, 0.22 * width, str(row))
    ax.set_xticks([(x + 0.45) * width for x in range(len(passes))], [f"pass {x + 1}" for x in range(len(passes))])


def _draw_weights(ax, left: float, width: float, height: int, text: str, color: str) -> None:
    draw_box(ax, left, 0.04, width, height - 0.08, color, edgecolor=LINE, linewidth=0.6)
    write(ax, left + width / 2, height / 2, text, color=ink_on(color))


def _draw_request(ax, left: float, row: int, width: float, text: str) -> None:
    color = REQUEST_COLORS[row]
    draw_box(ax, left, row + 0.08, width, 0.84, color, edgecolor=INK, linewidth=0.6)
    write(ax, left + width / 2, row + 0.52, text, color=ink_on(color))


def static_and_continuous() -> Picture:
    """Draw the same requests in static batches and with rows that are refilled as soon as they are free."""
    static = _trace_of("0pddddd 2pdd 4pddd", "1pdffff 3pdf 5pfff")
    refilled = _trace_of("0pddddd 4pddd", "1pd 2pdd 3pd 5p ee")
    return slot_timeline({"static batches": static, "rows refilled at once": refilled})


def separate_phases() -> Picture:
    """Draw a prefill that delays a decoding request on one replica, and does not on two."""
    together = _trace_of("0dddssssddd", "eee 1ppppddd")
    apart = _trace_of("0dddddddddd", "eeeeeee 1ddd", "eee 1pppp eee")
    title = "A prefill delays only the decodes that share its replica"
    return slot_timeline({"one replica": together, "two replicas": apart}, title)


def _trace_of(*rows: str) -> Trace:
    """Return a trace of rows such as "0pdd1pd": a request, and then its kinds of work by their first letters."""
    kinds, columns = {kind[0]: kind for kind in WORK}, []
    for row in rows:
        columns.append([])
        for request, works in re.findall(r"(\d?)([a-z]+)", row):
            for work in works:
                new = int(work in "pd")
                columns[-1].append(RowStep(kinds[work], int(request), new, 0, new) if request else RowStep())
    trace = Trace(len(rows))
    for number, steps in enumerate(zip(*columns, strict=True)):
        trace.passes.append(TracedPass(steps, float(number), 1.0))
    return trace


def token_budget(prompt_tokens: int, decoding: int, budget: int) -> Picture:
    """Draw the tokens of each forward pass while a prompt is computed: whole, and in chunks within a budget."""
    chunks = []
    while sum(chunks) < prompt_tokens:
        chunks.append(min(budget - decoding, prompt_tokens - sum(chunks)))
    whole = prompt_tokens + decoding
    figure, axes = new_figure(0.34 * len(chunks) + 1.95, 2, sharex=True, height_ratios=[1, len(chunks)])
    heading = f"whole: a pass of {whole} tokens, and every running request waits for it"
    for ax, name, prompts in zip(
        axes, (heading, f"in chunks: no pass exceeds {budget} tokens"), ([prompt_tokens], chunks), strict=True
    ):
        for y, tokens in enumerate(prompts):
            for request in range(decoding):
                ax.barh(y, 1, 0.76, left=request, color=REQUEST_COLORS[request % 7])
            ax.barh(y, tokens, 0.76, left=decoding, color=BLUE)
            write(ax, decoding + tokens / 2, y, f"{tokens} prompt tokens", color=ink_on(BLUE))
        ax.axvline(budget, color=shade(ORANGE, 0.8), linestyle="--", linewidth=1.4)
        ax.set(xlim=(0, whole), ylim=(len(prompts) - 0.5, -0.5))
        ax.set_yticks(range(len(prompts)), [f"pass {y + 1}" for y in range(len(prompts))])
        ax.tick_params(axis="y", length=0)
        set_panel_title(ax, name)
    axes[1].text(budget + 2, 0, f"budget: {budget} tokens", va="center", color=shade(ORANGE, 0.6))
    note = f"colors: one token of each of\n{decoding} requests that already decode"
    axes[1].text(budget + 2, 1 + (len(chunks) - 1) / 2, note, va="center", fontsize=SMALL, linespacing=1.4)
    axes[-1].set_xlabel("tokens computed in the pass")
    listed = ", ".join(map(str, chunks))
    alt = (
        f"Bars of the tokens of each forward pass. {decoding} requests decode when a prompt of {prompt_tokens} tokens "
        f"arrives. In one piece, it makes a pass of {whole} tokens. With a budget of {budget}, it "
        f"is computed in chunks of {listed}, and no pass exceeds the budget."
    )
    return Picture(figure, alt)


def padded_and_ragged() -> Picture:
    """Draw a forward pass over three decodes and a prefill: as padded rows, and as one row that attention splits."""
    lengths, columns = (1, 1, 1, 7), 11.5
    figure, (upper, middle, lower) = new_figure(3.71, 3, height_ratios=[4, 1.1, 1.1])
    for y, length in enumerate(lengths):
        for x in range(7):
            draw_cell(upper, x, y, REQUEST_COLORS[y] if x >= 7 - length else None)
    heading = "padded: 4 x 7 = 28 tokens computed, 18 of them pads"
    set_up_grid(upper, columns, 4, heading, [f"request {y}" for y in range(4)])
    for ax, gap, name in (
        (middle, 0, "ragged: the linear layers compute 10 tokens, in one row"),
        (lower, 0.5, "attention splits the row by request, and its results are joined again"),
    ):
        left = 0.0
        for request, length in enumerate(lengths):
            color = REQUEST_COLORS[request]
            for x in range(length):
                draw_cell(ax, left + x, 0, color)
            write(ax, left + length / 2, 0.52, str(request), color=ink_on(color))
            left += length + gap
        set_up_grid(ax, columns, 1, name)
    alt = (
        "A pass over 4 requests with 1, 1, 1, 7 tokens. Padded to one width, it computes 28 tokens, 18 of them pads. "
        "Side by side in one row, it computes 10 tokens. Only attention splits the row by request."
    )
    return Picture(figure, alt)


def merged_and_adapted(title: str = "") -> Picture:
    """Draw what a token of each of four requests reads: a merged model per adapter, or the base and the adapters."""
    figure, (merged, adapted) = new_figure(4.4 + 0.3 * bool(title), 2, title)
    names, width = ["sea", "honest", "no adapter", "sea"], 3.9
    set_up_grid(merged, width, 4, "merged: 3 models, so 3 forward passes, each of which reads all weights", names)
    whole = "all weights,\n{}\nmerged in"
    passes = [(whole.format("sea"), (0, 3)), (whole.format("honest"), (1,)), ("all\nweights", (2,))]
    _draw_passes(merged, passes, 4, 1.3)
    set_up_grid(adapted, width, 4, "adapters: 1 forward pass reads all weights once, and each adapter once", names)
    _draw_weights(adapted, 0, 0.86, 4, "all weights,\nonce", GRAY)
    for left, rows in ((0.94, (0, 3)), (1.36, (1,))):
        _draw_weights(adapted, left, 0.34, 4, "", LIGHT_SKY)
        for row in rows:
            _draw_request(adapted, left + 0.06, row, 0.22, "")
    for row in range(4):
        _draw_request(adapted, 1.78, row, 0.28, str(row))
    adapted.set_xticks([0.43, 1.11, 1.53], ["pass 1", "sea", "honest"])
    alt = (
        "Two drawings of 4 requests that each get a token. With merged weights, 3 models run in 3 forward passes, and "
        "each of them reads all weights. With adapters, 1 forward pass reads all weights once, and each adapter once "
        "for its own requests. sea: requests 0, 3; honest: requests 1."
    )
    return Picture(figure, alt)


def block_lookup(
    table: Sequence[int] = (4, 6, 7, 8),
    token: int = 9,
    block_size: int = 4,
    blocks: int = 12,
    color: str = SKY,
    stage: int = 3,
) -> Picture:
    """Draw how a block table leads from the position of a token to its slot in the memory of the KV cache.

    Args:
        table: the block numbers of the request, in the order of its tokens.
        token: the position whose slot is looked up; all blocks are drawn as full.
        block_size: the number of tokens that fit in a block.
        blocks: the number of blocks in the memory.
        color: the color of the request.
        stage: how far the look-up is drawn: 1 for the position, 2 for the table, 3 for the memory.
    """
    index, offset = divmod(token, block_size)
    slot, width = table[index] * block_size + offset, len(table) * block_size
    figure, (top, middle, bottom) = new_figure(4.1, 3)
    for x in range(width):
        draw_cell(top, x, 0, color, framed=x == token)
        weight = "bold" if x == token else "normal"
        write(top, x + 0.5, 0.52, str(x), SMALL, color=ink_on(color), weight=weight)
    heading = f"1. Token {token}: {token} // {block_size} = {index} and {token} % {block_size} = {offset}, "
    set_up_grid(top, width, 1, heading + f"so place {offset} in entry {index} of the table")
    for x, block in enumerate(table):
        line = 1.8 if x == index and stage > 1 else 0
        draw_box(middle, x * block_size + 0.06, 0.06, block_size - 0.12, 0.88, color, edgecolor=INK, linewidth=line)
        write(middle, (x + 0.5) * block_size, 0.52, f"{x}: block {block}", color=ink_on(color))
    heading = f"2. The block table: entry {index} is block {table[index]}" if stage > 1 else "2. The block table"
    set_up_grid(middle, width, 1, "")
    aside = "left" if 2 * token >= width else "right"  # where no arrow crosses it
    middle.set_title(heading, loc=aside)
    for block in range(blocks):
        for cell_index in range(block_size):
            here = stage > 2 and block * block_size + cell_index == slot
            look = {"facecolor": color if block in table else PAGE, "edgecolor": INK if here else LINE}
            look |= {"linewidth": 1.8 if here else 0.6, "zorder": 3 if here else 1}
            cell = 0.92 / block_size
            draw_box(bottom, block + 0.04 + cell_index * cell, 0.06, cell, 0.7, **look)
        write(bottom, block + 0.5, 1.02, str(block))
    heading = f"3. The memory: slot {table[index]} x {block_size} + {offset} = {slot} holds its key and value"
    set_up_grid(bottom, blocks, 1, "")  # its heading is below it, where no arrow crosses it
    bottom.set_xlabel(heading if stage > 2 else "3. The memory, block by block", loc="left")
    bottom.set_ylim(1.2, 0)
    arrow = {"arrowstyle": "->", "color": INK, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 2}
    ends = (
        (top, (token + 0.5, 0.97), middle, ((index + 0.5) * block_size, 0.06)),
        (middle, ((index + 0.5) * block_size, 0.97), bottom, (table[index] + 0.04 + (offset + 0.5) * cell, 0.06)),
    )
    for start, from_point, end, to_point in ends[: stage - 1]:
        coordinates = {"coordsA": start.transData, "coordsB": end.transData, "zorder": 5}
        figure.add_artist(ConnectionPatch(from_point, to_point, **coordinates, **arrow))
    alt = (
        f"Token {token} is in entry {index} of the block table {list(table)}, at place {offset}. The entry names block "
        f"{table[index]} of the memory, so the token's key and value are in slot {slot}."
    )
    return Picture(figure, alt)


def block_lookup_steps(**options) -> FlipBook:
    """Return `block_lookup` as a flip book: the position, the table, the memory. The options are those of a lookup."""
    captions = (
        "Divide the token's position by the block size.",
        "The quotient is an entry of the block table, and the entry names a block of the memory.",
        "The remainder is the token's place in that block. Its key and value are stored there.",
    )
    pictures = [block_lookup(**options, stage=stage) for stage in (1, 2, 3)]
    return FlipBook(pictures, captions, "From a token to its key and value")
