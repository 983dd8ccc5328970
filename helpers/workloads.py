"""Named mixes of requests for the lessons and the benchmarks; the same seed gives the same requests.

The grammar that wrote the embedded model's training text also writes the prompts, but with word pairs that the training
text does not contain. The model therefore cannot have memorized their continuations.
"""

import random

from .request import Request
from .tiny_model.corpus import ANIMALS, TRAITS, Writer, a, unseen_prompts


def race(requests: int = 32, every: int = 8, long: int = 100, short: int = 10) -> list[Request]:
    """Make a race: max_tokens is `long` for one request in `every`, and `short` for the others.

    All prompts are story openings of equal length (7 tokens for the embedded model). The model continues each for more
    than 100 tokens, so no output ends early, and all counts follow from max_tokens alone.
    """
    return [
        Request(f"Once upon a time, {a(TRAITS[i % len(TRAITS)])}", long if i % every == 0 else short, request_id=i)
        for i in range(requests)
    ]


def mixed(requests: int = 32, max_tokens: int = 400, seed: int = 30) -> list[Request]:
    """Make prompts of unequal length whose outputs end with EOS: sayings, answers and stories.

    The lengths of the outputs span an order of magnitude. With the default seed, the best token leads clearly at every
    step of the embedded model's 32 outputs, so the lengths that a lesson stores are the same on every machine.
    """
    return [Request(prompt, max_tokens, request_id=i) for i, prompt in enumerate(unseen_prompts(requests, seed))]


def budgets(requests: int = 32, low: int = 1, high: int = 128, seed: int = 0) -> list[Request]:
    """Make prompts of unequal length with a random max_tokens, by default uniform over Orca's output lengths."""
    draw = random.Random(seed)
    prompts = unseen_prompts(requests, seed)
    return [Request(prompt, draw.randint(low, high), request_id=i) for i, prompt in enumerate(prompts)]


def pages(requests: int = 8, words: int = 340, max_tokens: int = 20, seed: int = 4) -> list[Request]:
    """Make long prompts: consecutive stories, cut at the first sentence end after `words` words.

    With the defaults, a prompt has 397 to 422 of the embedded model's tokens (its context is 512), and the best token
    leads clearly at every step. An output ends where its story ends; set `ignore_eos` for outputs of equal length.
    """
    writer, prompts = Writer(seed), []
    for _ in range(requests):
        text: list[str] = []
        while len(text) < 2 * words:
            text += writer.story().split()
        end = next(position for position in range(words, len(text)) if text[position].endswith("."))
        prompts.append(" ".join(text[: end + 1]))
    return [Request(prompt, max_tokens, request_id=i) for i, prompt in enumerate(prompts)]


def one_beginning(requests: int = 16, words: int = 100, max_tokens: int = 40, seed: int = 6) -> list[Request]:
    """Make prompts that share a prefix as long as a short system prompt, each followed by a few words of its own.

    With the defaults, the best token leads clearly at every step of the embedded model's outputs.
    """
    writer, draw, story = Writer(seed), random.Random(seed), []
    while len(story) <= words + 40:
        story = writer.story().split()
    end = next(position for position in range(words, len(story)) if story[position].endswith("."))
    beginning = " ".join(story[: end + 1])
    heroes = [f"{a(trait)} {draw.choice(list(ANIMALS))}" for trait in draw.sample(TRAITS, requests)]
    return [Request(f"{beginning} Then {hero}", max_tokens, request_id=i) for i, hero in enumerate(heroes)]


def told_again(requests: int = 4, max_tokens: int = 80) -> list[Request]:
    """Make prompts that tell a story and then begin it again: the embedded model repeats most of it in its own output.

    There are at most as many requests as stories. The best token leads clearly at every step of the outputs, which end
    with EOS after 60 to 64 tokens.
    """
    prompts = []
    for hero, name, she, her, place, day, friend in TOLD_AGAIN[:requests]:
        opening = (
            f"Once upon a time, {hero} named {name} lived near {place}. "
            f'"I want to see the winter market before winter comes," {she} said, and one {day} {she} left.'
        )
        rest = (
            f'Soon {she} came to a field of deep snow. "I will sink up to my ears," thought {name}. '
            f"But a {friend} lent {her} two broad pieces of bark. At last {she} reached the winter market, and it was "
            f"more beautiful than any picture. And when {she} came home, {she} was tired and very happy."
        )
        prompts.append(f"{opening} {rest} {opening}")
    return [Request(prompt, max_tokens, request_id=i) for i, prompt in enumerate(prompts)]


TOLD_AGAIN = [
    ("a proud gardener", "Ida", "she", "her", "a wide green valley", "misty afternoon", "frog"),
    ("a shy crow", "Oskar", "he", "him", "the foot of a mountain", "rainy evening", "badger"),
    ("a happy crow", "Rosa", "she", "her", "the old stone bridge", "golden evening", "badger"),
    ("a shy badger", "Mila", "she", "her", "a quiet lake", "cold morning", "badger"),
]


def clear_stories(max_tokens: int = 64) -> list[Request]:
    """Make 24 story openings for which the best token leads at every step, also with quantized weights.

    It leads by at least 0.002 in the embedded model and in its int8 and int4 versions, each on its own output and on
    the float32 one. So the outputs, and where they begin to differ, do not depend on the processor. With int8, 1 text
    changes, and with int4, 12 do: about the shares of 110 random stories, which were 5 and 59.
    """
    return [Request(f"Once upon a time, {a(hero)}", max_tokens, request_id=i) for i, hero in enumerate(CLEAR_HEROES)]


CLEAR_HEROES = [
    "stubborn squirrel", "hungry goat", "stubborn donkey", "modest cat", "stubborn sailor",
    "careful shepherd", "shy frog", "stubborn shepherd", "thoughtful cat", "cheerful sailor",
    "happy otter", "kind fox", "curious owl", "grumpy owl", "gentle tailor",
    "sleepy cat", "hopeful tailor", "sleepy mouse", "restless frog", "wise cat",
    "busy baker", "clumsy donkey", "tiny cat", "brave fox",
]  # fmt: skip
