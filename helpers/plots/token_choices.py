"""Pictures of how a token is chosen: probabilities side by side, and an output that had to follow a pattern."""

from collections.abc import Mapping, Sequence

from matplotlib.patches import Circle, FancyBboxPatch

from .colors import GRAY, INK, ORANGE, PAGE, PALE, RED, REQUEST_COLORS, SKY, SMALL, ink_on, shade
from .picture import Picture, add_key, draw_arrow, new_figure, write

OTHERS = "all others"


def probability_strips(rows: Mapping[str, Mapping[str, float]], number: float, title: str = "") -> Picture:
    """Draw the probabilities of each row side by side from 0 to 1, and which token a random number draws.

    A token has the same color in all rows. What a row lacks to 1 is one pale segment: all the other tokens.

    Args:
        rows: the probabilities of the best tokens, in the order in which they are laid side by side, at most seven.
        number: from 0 to 1; in each row, the segment in which it falls is framed and named.
    """
    figure, (ax,) = new_figure(0.5 * len(rows) + 1.1, title=title)
    tokens = dict.fromkeys(token for row in rows.values() for token in row)
    colors = dict(zip(tokens, REQUEST_COLORS, strict=False))
    described = []
    for y, (name, row) in enumerate(rows.items()):
        left, drawn = 0.0, ""
        for token, width in {**row, OTHERS: 1 - sum(row.values())}.items():
            if width <= 1e-6:
                continue
            color = colors.get(token, PALE)
            hit = left <= number < left + width
            look = {"edgecolor": INK, "linewidth": 2, "zorder": 3} if hit else {"edgecolor": PAGE, "linewidth": 0.5}
            ax.barh(y, width, left=left, height=0.66, color=color, **look)
            style = {"va": "center", "fontsize": SMALL, "zorder": 4}
            if 0.016 * len(token) + 0.008 < width:
                ax.text(left + width / 2, y, token, ha="center", color=ink_on(color), **style)
            if hit:
                hit_token = "another" if token == OTHERS else token
                drawn = f", draws {hit_token}"
                ax.annotate(
                    f"→ {hit_token}", (1, y), (6, 0), textcoords="offset points", annotation_clip=False, **style
                )
            left += width
        listed = ", ".join(f"{token} {width:.2f}" for token, width in row.items() if width > 1e-6)
        described.append(f"{name}: {listed}{drawn}")
    ax.axvline(number, color=INK, linestyle="--", linewidth=1.2, zorder=5)
    ax.text(number, -0.55, f"the number {number:g} draws", ha="center", va="bottom")
    ax.set_ylim(len(rows) - 0.5, -0.55)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.tick_params(axis="y", length=0)
    ax.set(xlim=(0, 1), xlabel="probability, added up")
    return Picture(figure, f"Probabilities side by side. {'; '.join(described)}.")


def constrained_text(tokens: Sequence[str], allowed: Sequence[int], title: str = "") -> Picture:
    """Draw an output character by character, and how many tokens a pattern allowed at the place of each token.

    Args:
        tokens: the text of each token.
        allowed: how many tokens the pattern allowed at each place; at 1, the model had no choice.
    """
    lines, columns = [[]], 0  # each: (token, its allowed tokens, its column)
    for token, count in zip(tokens, allowed, strict=True):
        if columns + len(token) > 40:
            lines.append([])
            columns = 0
        lines[-1].append((token, count, columns))
        columns += len(token)
    longest = max(sum(len(token) for token, *_ in line) for line in lines)
    figure, (ax,) = new_figure(0.78 * len(lines) + 0.75, title=title)
    ax.set_axis_off()
    ax.set(xlim=(-0.2, max(longest, 24) + 0.2), ylim=(1.15 * len(lines) - 0.12, -0.5))
    for y, line in enumerate(lines):
        top = 1.15 * y
        for token, count, left in line:
            look = {"facecolor": PALE, "edgecolor": GRAY} if count == 1 else {"facecolor": ORANGE, "edgecolor": INK}
            box = (left + 0.06, top), len(token) - 0.12, 0.56
            ax.add_patch(FancyBboxPatch(*box, boxstyle="round,pad=0,rounding_size=0.12", linewidth=0.9, **look))
            for offset, character in enumerate(token):
                shown = "␣" if character == " " else character
                write(ax, left + offset + 0.5, top + 0.28, shown, family="monospace", color=ink_on(look["facecolor"]))
            if count > 1:
                write(ax, left + len(token) / 2, top - 0.2, f"{count:,}", SMALL - 1)
    free = sum(count > 1 for count in allowed)
    key = {
        "chosen from so many tokens": {"facecolor": ORANGE, "edgecolor": INK},
        "the only token allowed": {"facecolor": PALE, "edgecolor": GRAY},
    }
    add_key(figure, key, columns=2)
    listed = ", ".join(f"{token!r} {count}" for token, count in zip(tokens, allowed, strict=True))
    alt = f"An output of {len(tokens)} tokens, {free} of them chosen from several. Token, allowed tokens: {listed}."
    return Picture(figure, alt)


def tokens_over_states(tokens: Sequence[str], refused: tuple[str, str], first: int = 0, title: str = "") -> Picture:
    """Draw the states of an automaton as a chain, a character on each edge, and the tokens that span several edges.

    Args:
        tokens: the texts of tokens that the automaton reads one after the other.
        refused: the text of a token that may not follow, and its character without an edge.
        first: the number of the first state.
    """
    figure, (ax,) = new_figure(1.75, title=title)
    ax.set_axis_off()
    ax.set_aspect("equal")
    characters = "".join(tokens)
    ax.set(xlim=(-0.5, len(characters) + 1.4), ylim=(-0.95, 0.5))
    for state in range(len(characters) + 1):
        ax.add_patch(Circle((state, 0), 0.24, facecolor=PALE, edgecolor=INK, linewidth=1))
        write(ax, state, 0, str(first + state))
        if state < len(characters):
            draw_arrow(ax, (state + 0.26, 0), (state + 0.74, 0))
            shown = characters[state].replace(" ", "␣")
            write(ax, state + 0.5, 0.24, shown, family="monospace")
    left = 0
    for token, color in zip([*tokens, refused[0]], [SKY] * len(tokens) + [RED], strict=True):
        width = len(token) if color == SKY else 1
        ends = left + 0.08, left + width - 0.08
        ax.plot([ends[0], *ends, ends[1]], [-0.4, -0.5, -0.5, -0.4], color=color)
        shown = token.replace(" ", "␣") if color == SKY else f"{refused[0]} refused"
        write(ax, left + width / 2, -0.72, shown, family="monospace", color=shade(color, 0.7))
        left += width
    end = len(characters)
    draw_arrow(ax, (end + 0.26, 0), (end + 0.74, 0), color=RED, linestyle="--")
    write(ax, end + 0.5, 0.24, refused[1], family="monospace", color=RED)
    write(ax, end + 0.9, 0, "×", 16, color=RED)
    listed = ", ".join(f"{token!r} over {len(token)} edges" for token in tokens)
    alt = f"States {first} to {first + end} in a chain, the characters {characters!r} on the edges. Tokens: {listed}."
    return Picture(figure, f"{alt} The token {refused[0]!r} is refused: no edge has the character {refused[1]!r}.")
