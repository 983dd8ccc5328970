"""Named mixes of requests, the same ones for the same seed: what the lessons and the benchmarks run.

The prompts are written by the embedded model's own grammar, but with word pairs that its training text does not
contain, so no answer can be known by heart.
"""

import random

from .batching import Request
from .tiny_model.corpus import ANIMALS, TRAITS, Writer, a, unseen_prompts


def race(requests: int = 32, every: int = 8, long: int = 100, short: int = 10) -> list[Request]:
    """The classic race: `long` output tokens for every eighth request, `short` for the others.

    All prompts are openings of stories of equal length (7 tokens for the embedded model), whose stories run
    longer than 100 tokens: nothing ends early, and all counts follow from the budgets alone.
    """
    return [
        Request(f"Once upon a time, {a(TRAITS[i % len(TRAITS)])}", long if i % every == 0 else short, request_id=i)
        for i in range(requests)
    ]


def mixed(requests: int = 32, max_tokens: int = 400, seed: int = 30) -> list[Request]:
    """Unequal prompts and natural ends: sayings, answers and stories that stop by themselves, an order of
    magnitude apart in length.

    With the default seed the best token leads clearly at every step of the embedded model's 32 outputs, so that
    lengths which a lesson stores are the same on every machine.
    """
    return [Request(prompt, max_tokens, request_id=i) for i, prompt in enumerate(unseen_prompts(requests, seed))]


def budgets(requests: int = 32, low: int = 1, high: int = 128, seed: int = 0) -> list[Request]:
    """Unequal prompts, and budgets drawn evenly from low to high (output lengths as in Orca's evaluation)."""
    draw = random.Random(seed)
    prompts = unseen_prompts(requests, seed)
    return [Request(prompt, draw.randint(low, high), request_id=i) for i, prompt in enumerate(prompts)]


def pages(requests: int = 8, words: int = 340, max_tokens: int = 20, seed: int = 4) -> list[Request]:
    """Long prompts: stories one after another, up to the first sentence that ends after so many words.

    With the defaults they have 397 to 422 tokens of the embedded model, whose context is 512, and its best token leads
    clearly at every step. Where a story is over, so is the answer: for equal lengths, say `ignore_eos`.
    """
    writer, prompts = Writer(seed), []
    for _ in range(requests):
        text: list[str] = []
        while len(text) < 2 * words:
            text += writer.story().split()
        end = next(place for place in range(words, len(text)) if text[place].endswith("."))
        prompts.append(" ".join(text[: end + 1]))
    return [Request(prompt, max_tokens, request_id=i) for i, prompt in enumerate(prompts)]


def one_beginning(requests: int = 16, words: int = 100, max_tokens: int = 40, seed: int = 6) -> list[Request]:
    """The same beginning of a story for all, as long as a short system prompt, and a few words of its own for each.

    With the defaults the best token leads clearly at every step of the embedded model's answers.

    Raises:
        ValueError: more requests than there are ways to go on.
    """
    writer, draw, story = Writer(seed), random.Random(seed), []
    while len(story) <= words + 40:
        story = writer.story().split()
    end = next(place for place in range(words, len(story)) if story[place].endswith("."))
    beginning = " ".join(story[: end + 1])
    heroes = [f"{a(trait)} {draw.choice(list(ANIMALS))}" for trait in draw.sample(TRAITS, requests)]
    return [Request(f"{beginning} Then {hero}", max_tokens, request_id=i) for i, hero in enumerate(heroes)]
