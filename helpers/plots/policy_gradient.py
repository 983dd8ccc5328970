"""Pictures of reinforcement learning: one step of a policy gradient, from rollouts to new weights."""

from statistics import fmean, pstdev

from matplotlib.patches import FancyArrowPatch

from .colors import BLUE, INK, PAGE, PALE, RED, REQUEST_COLORS, SMALL, ink_on
from .picture import Picture, draw_box, new_figure, write

REWARDS, LENGTHS = (0, 1, 0, 0), (7, 5, 8, 6)  # of each rollout: what it earns, and its tokens


def policy_gradient_step() -> Picture:
    """Draw one step of GRPO for one prompt: a group of rollouts, their rewards and advantages, and the update."""
    mean, deviation, rows = fmean(REWARDS), pstdev(REWARDS), len(REWARDS)
    advantages = [(reward - mean) / deviation for reward in REWARDS]
    figure, (ax,) = new_figure(3.4, title="What beats its group becomes more probable")
    ax.set_axis_off()
    heads = ((4.6, "the engine\nwrites rollouts"), (11.6, "the rule\nscores them"), (15.2, "advantage in\nthe group"))
    for x, text in (*heads, (20.4, "the trainer\nchanges weights")):
        write(ax, x, -0.75, text, SMALL, weight="bold")
    draw_box(ax, 0, 0, 2.4, rows - 0.1, PALE, edgecolor=INK, linewidth=0.7)
    write(ax, 1.2, (rows - 0.1) / 2, "prompt", SMALL)
    for y, (reward, length, advantage) in enumerate(zip(REWARDS, LENGTHS, advantages, strict=True)):
        color, middle = REQUEST_COLORS[y % 7], y + 0.45
        for token in range(length):
            draw_box(ax, 2.6 + 0.95 * token, y + 0.1, 0.85, 0.7, color)
        write(ax, 3.02, middle, str(y), SMALL, color=ink_on(color))
        write(ax, 11.6, middle, str(reward), weight="bold")
        end = 15.2 + 1.0 * advantage
        face = BLUE if advantage > 0 else RED
        left, right = sorted((15.2, end))
        draw_box(ax, left, y + 0.2, right - left, 0.5, face)
        write(ax, end + (0.75 if advantage > 0 else -0.75), middle, f"{advantage:+.1f}".replace("-", "−"), SMALL)
    ax.plot([15.2, 15.2], [0, rows - 0.1], color=INK, linewidth=0.8)
    draw_box(ax, 18.9, 0, 3.1, rows - 0.1, PAGE, edgecolor=INK, linewidth=1.2)
    write(ax, 20.45, (rows - 0.1) / 2, "gradient\nstep", SMALL)
    back = {"connectionstyle": "arc3,rad=-0.12", "arrowstyle": "->", "mutation_scale": 12, "color": INK}
    ax.add_patch(FancyArrowPatch((20.4, rows), (4.6, rows), linewidth=1.4, **back))
    box = {"facecolor": PAGE, "linewidth": 0, "pad": 2}
    write(ax, 12.5, rows + 1.0, "new weights; the engine forgets its cached blocks", SMALL, bbox=box)
    ax.set(xlim=(-0.2, 23.2), ylim=(rows + 1.7, -1.5))
    each = "; ".join(
        f"rollout {number}: reward {reward}, advantage {advantage:+.1f}"
        for number, (reward, advantage) in enumerate(zip(REWARDS, advantages, strict=True))
    )
    alt = (
        f"A loop. The engine writes {rows} rollouts of one prompt, and a rule scores them. {each}. The trainer takes a "
        "gradient step, and its new weights go back to the engine, which forgets its cached blocks."
    )
    return Picture(figure, alt)
