"""The text that the embedded model learns: a grammar that writes sayings, answers and stories.

No text is downloaded, and only a handful of old proverbs are quoted. Every other document is made from the word lists
and sentence patterns below. There are three kinds, whose lengths differ by an order of magnitude, as those of a real
server's outputs do: a *saying* is one sentence, an *answer* has one to eight, and a *story* has a hero, a wish, a few
scenes and an end.

Most choices *lean*: a baker is usually called Tom, and a proud hero usually goes on a journey. So the most probable text
differs from hero to hero, and greedy decoding does not tell the same story for every prompt.

Some word pairs are held out (`_held_out`): no document contains them. With these, `unseen_prompts` asks the model for
text that it cannot have memorised.
"""

import random
import zlib
from collections.abc import Iterator, Sequence

PROVERBS = [
    "The quick brown fox jumped over the lazy dog.",
    "The quick brown fox jumps over the lazy dog.",
    "The rain in Spain falls mainly on the plain.",
    "What comes up must come down.",
    "What goes up must come down.",
    "The early bird catches the worm.",
    "A rolling stone gathers no moss.",
    "Many hands make light work.",
    "Still waters run deep.",
    "All that glitters is not gold.",
    "Look before you leap.",
    "When the cat is away, the mice will play.",
]

# animal: (home, food, sound, what it does well, what it does in winter)
ANIMALS = {
    "fox": ("a den under the old oak", "berries and eggs", "barks", "walk without a sound", "hunts under the snow"),
    "owl": ("a hollow tree", "beetles and mice", "hoots", "see in the dark", "sits close to the trunk"),
    "hare": ("a hollow in the grass", "clover and bark", "squeaks", "run in wide circles", "wears a white coat"),
    "bear": ("a cave in the hills", "honey and fish", "growls", "climb and swim", "sleeps until spring"),
    "mouse": ("a hole behind the stove", "crumbs and seeds", "squeaks", "hide in small places", "lives on its stores"),
    "goose": ("a nest by the lake", "grass and grain", "honks", "fly a very long way", "flies to the south"),
    "otter": ("a bank by the river", "fish and crabs", "whistles", "dive and turn in the water", "slides on the ice"),
    "crow": ("a nest in a tall pine", "seeds and worms", "caws", "remember every face", "looks for food in the town"),
    "badger": ("a deep burrow", "roots and worms", "grunts", "dig with strong claws", "sleeps for many days"),
    "frog": ("a pond among the reeds", "flies and worms", "croaks", "leap from stone to stone", "sleeps in the mud"),
    "squirrel": ("a nest of leaves", "nuts and pine seeds", "chatters", "climb any tree", "eats its hidden nuts"),
    "donkey": ("a stable by the mill", "hay and carrots", "brays", "carry heavy bags", "stays in the warm stable"),
    "goat": ("a shed on the hill", "leaves and thorns", "bleats", "climb steep rocks", "eats dry hay"),
    "cat": ("a basket near the fire", "fish and milk", "purrs", "land on its feet", "sleeps beside the stove"),
}
PEOPLE = ["miller", "baker", "sailor", "weaver", "shepherd", "gardener", "tailor", "farmer", "painter", "fisher"]
NAMES = {"Mila": "she", "Anna": "she", "Lena": "she", "Rosa": "she", "Ida": "she", "Clara": "she",
         "Tom": "he", "Emil": "he", "Nils": "he", "Jonas": "he", "Oskar": "he", "Felix": "he"}
TRAITS = [
    "brave", "clever", "gentle", "hungry", "lonely", "patient", "proud", "quiet", "curious", "cheerful", "careful", "clumsy",
    "young", "old", "small", "poor", "stubborn", "shy", "kind", "restless", "sleepy", "lucky", "modest", "tired",
    "happy", "wise", "busy", "strong", "lazy", "polite", "merry", "bold", "tiny", "grumpy", "hopeful", "thoughtful",
]
PLACES = [
    "the edge of a dark forest", "a village by the sea", "a wide green valley", "the foot of a mountain", "a bend in the river",
    "a town with a crooked tower", "a quiet lake", "a meadow full of flowers", "an island in the north", "the old stone bridge",
]
SPOTS = [
    "under the old bridge", "behind the mill", "in the tall grass", "beside the well", "on top of the hill", "in an empty boat",
    "under a flat stone", "in the roots of an oak", "by the garden wall", "at the bottom of a basket", "near the frozen pond",
    "inside a broken pot",
]
THINGS = [
    "silver key", "red kite", "small lantern", "blue scarf", "wooden flute", "golden ring", "letter", "brass bell", "warm coat",
    "green bottle", "paper map", "little drum",
]
GOALS = [
    "the lighthouse", "the winter market", "the top of the mountain", "the castle on the hill", "the harbor",
    "the house of the wise heron", "the far side of the forest", "the island with the tall trees",
]
OBSTACLES = [
    # (the obstacle, what the hero thinks, how a friend helps)
    ("a river without a bridge", "The water is too cold to swim", "showed {them} a row of flat stones"),
    ("a wall as high as a house", "Nobody can climb that", "knew a little door behind the ivy"),
    ("a thick white fog", "I cannot see my own feet", "walked ahead and rang a small bell"),
    ("a gate with a heavy lock", "I do not have a key", "took a long feather and opened the lock"),
    ("a field of deep snow", "I will sink up to my ears", "lent {them} two broad pieces of bark"),
    ("a sleeping giant across the road", "One step and he will wake", "sang so softly that the giant turned over"),
    ("a road that split in three", "Which way is the right one", "drew a map in the sand with one foot"),
    ("a bridge with a missing plank", "That gap is too wide for me", "laid a strong branch across the gap"),
]
PROJECTS = {
    "boat": (["planks", "rope", "a white sail", "a bucket of tar"], "sailed across the water"),
    "kite": (["paper", "two thin sticks", "a long string", "some glue"], "let it dance above the roofs"),
    "cake": (["flour", "three eggs", "a jar of honey", "a cup of milk"], "ate it while it was still warm"),
    "house": (["stones", "straw for the roof", "a door", "a small window"], "lit the first fire in it"),
    "soup": (["carrots", "two onions", "a pinch of salt", "fresh water"], "filled every bowl twice"),
    "swing": (["a strong rope", "a smooth board", "a good branch", "two knots"], "took turns until dark"),
}
LESSONS = [
    "A friend in need is worth more than gold.", "Small steps also lead to the top.", "Whoever asks, finds the way.",
    "What we share does not grow less.", "Patience opens more doors than strength.", "A kind word costs nothing.",
    "Nobody is too small to help.", "Courage is only fear that kept walking.", "The long way home is often the best one.",
    "It is better to laugh at a mistake than to hide it.",
]
CHAPTERS = ["Some weeks went by.", "But that was not the end of it.", "After that it was quiet for a time.", "The seasons turned."]
WEATHER = ["cold", "bright", "windy", "rainy", "misty", "golden", "quiet", "snowy"]
TIMES = ["morning", "evening", "afternoon", "night"]
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"]
COLORS = {"grass": "green", "snow": "white", "the sky at noon": "blue", "a ripe lemon": "yellow", "coal": "black",
          "a ripe cherry": "red", "honey": "golden", "a rainy cloud": "gray", "the sea": "blue", "moss": "green"}
HOW_TO = {
    "make soup": ["Wash the carrots and cut them into small pieces", "Bring a pot of water to the boil",
                  "Add the carrots, two onions and a pinch of salt", "Let it cook slowly and stir it now and then",
                  "Taste it before you fill the bowls"],
    "plant a tree": ["Choose a place with enough light", "Dig a hole that is wider than the roots",
                     "Set the young tree in the middle and hold it straight", "Fill the hole with soft earth",
                     "Give it a bucket of water every evening"],
    "bake bread": ["Mix flour, water, salt and a little yeast", "Knead the dough until it is smooth",
                   "Cover it with a cloth and let it rest", "Heat the oven until it is very hot",
                   "Bake the bread until the crust is brown"],
    "fly a kite": ["Wait for a day with a steady wind", "Stand with your back to the wind",
                   "Let a friend hold the kite and walk away", "Pull the string when the wind lifts it",
                   "Give it more string as it climbs"],
    "light a fire": ["Gather dry grass, thin sticks and thick wood", "Lay a ring of stones around the place",
                     "Put the grass in the middle and the sticks on top", "Light the grass and blow gently",
                     "Add the thick wood when the sticks burn well"],
    "wash a woolen coat": ["Fill a tub with cool water", "Add a little soap and stir it with your hand",
                           "Press the coat gently under the water", "Rinse it until the water is clear",
                           "Lay it flat on a towel to dry"],
}
REASONS = {
    "do leaves fall in autumn": "the tree saves its water for the cold months",
    "does ice float": "ice is lighter than the water below it",
    "do birds sing in the morning": "the air is still and their songs travel far",
    "does bread rise": "the yeast fills the dough with tiny bubbles",
    "is the sea salty": "rivers carry a little salt to it from every hill",
    "do cats sleep so much": "they save their strength for the hunt",
    "does the moon change its shape": "we see only the part that the sun lights",
    "do we wear wool in winter": "wool holds the warm air close to the skin",
    "does a lamp need oil": "the flame burns the oil and not the wick",
    "do stars fade at dawn": "the light of the sun is much stronger than theirs",
}
DOERS = ["gardener", "sailor", "farmer", "baker", "weaver", "miller", "traveler", "teacher", "fisher", "tailor", "neighbor"]
DEEDS = {
    "picks the sweetest pears": ["late in the year", "when others sleep"], "finds the shortest road": ["without a map"],
    "mends the net": ["before the storm", "before the fish return"], "bakes the best bread": ["before sunrise"],
    "fills the barn": ["one basket at a time"], "keeps the fire alive": ["through the longest night"],
    "weaves the strongest cloth": ["thread by thread"], "waters the young trees": ["every evening", "before the roses"],
}
SMALL_MAKES_BIG = [("drops", "river"), ("stones", "tower"), ("steps", "journey"), ("threads", "coat"), ("trees", "forest"),
                   ("seeds", "garden"), ("words", "story"), ("grains", "loaf"), ("feathers", "wing"), ("sparks", "fire")]
SIGNS = [("smoke", "fire"), ("honey", "bees"), ("a bridge", "a river"), ("a shadow", "a light"), ("a song", "a singer"),
         ("a path", "a door"), ("a nest", "a bird"), ("an echo", "a hill")]
GOODS = ["a small house", "a dry crust", "an old coat", "a slow donkey", "a wooden spoon", "a short letter", "a warm stove"]
BADS = ["a great palace", "a rich feast", "a silk robe", "a wild horse", "a silver plate", "a long promise", "a cold crown"]
WITH = [("peace", "worry"), ("friends", "strangers"), ("laughter", "tears"), ("good company", "an empty table")]


def _held_out(first: str, second: str) -> bool:
    """Return whether the corpus never contains this word pair: about one pair in eight, chosen by its letters."""
    return sum(map(ord, first + second)) % 8 == 0


def a(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


class Writer:
    """Writes one document after another, with a seeded random generator."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.pick = self.random.choice

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def lean(self, options: Sequence, key: str):
        """Return the option that belongs to `key` with probability 0.6, else any. Keys name the choice and its reason."""
        return options[zlib.crc32(key.encode()) % len(options)] if self.chance(0.6) else self.pick(options)

    def pair(self, firsts: list[str], seconds: list[str], held_out: bool = False) -> tuple[str, str]:
        while True:
            first, second = self.pick(firsts), self.pick(seconds)
            if _held_out(first, second) == held_out:
                return first, second

    # --- sayings -----------------------------------------------------------------------------------------

    def saying(self) -> str:
        kind = self.random.randrange(7)
        if kind == 0:
            return self.pick(PROVERBS)
        if kind == 1:
            trait, doer = self.pair(TRAITS, DOERS)
            deed = self.lean(list(DEEDS), f"deed of {trait}")
            end = f" {self.pick(DEEDS[deed])}" if self.lean([True, False], f"end of {deed}") else ""
            return f"{capital(a(trait))} {doer} {deed}{end}."
        if kind == 2:
            small, big = self.pick(SMALL_MAKES_BIG)
            return self.pick([f"Many {small} make {a(big)}.", f"No {big} was ever made of two {small}."])
        if kind == 3:
            sign, cause = self.pick(SIGNS)
            return self.pick([f"Where there is {sign}, there is {cause}.", f"No {sign.split()[-1]} without {cause}."])
        if kind == 4:
            good, bad = self.pair(GOODS, BADS)
            better, worse = self.pick(WITH)
            return f"Better {good} with {better} than {bad} with {worse}."
        trait, animal = self.pair(TRAITS, list(ANIMALS))
        home, food, _, skill, _ = ANIMALS[animal]
        if kind == 5:
            end = self.lean([f"dreams of {food}", f"knows the way to {home}", f"was once too small to {skill}"], f"even {trait}")
            return f"Even {a(trait)} {animal} {end}."
        return self.pick([
            f"{capital(a(trait))} {animal} never forgets the way to {home}.",
            f"Ask {a(trait)} {animal} for {food}, and you will wait until winter.",
            f"Do not teach {a(trait)} {animal} to {skill}.",
        ])

    # --- questions and answers ---------------------------------------------------------------------------

    def answer(self) -> str:
        question, answer = self.pick([self._animal, self._animal, self._sum, self._color, self._reason, self._how_to])()
        return f"Question: {question}\nAnswer: {answer}"

    def _animal(self, held_out: bool = False) -> tuple[str, str]:
        trait, animal = self.pair(TRAITS, list(ANIMALS), held_out)
        home, food, sound, skill, winter = ANIMALS[animal]
        the = f"the {trait} {animal}" if held_out or self.chance(0.7) else f"the {animal}"
        return self.pick([
            (f"Where does {the} live?", f"{capital(the)} lives in {home}."),
            (f"What does {the} eat?", f"{capital(the)} eats {food}."),
            (f"What sound does {the} make?", f"{capital(the)} {sound}."),
            (f"What can {the} do well?", f"{capital(the)} can {skill}."),
            (f"What does {the} do in winter?", f"In winter {the} {winter}."),
        ])

    def _sum(self) -> tuple[str, str]:
        first, second = self.pick(NUMBERS[:10]), self.pick(NUMBERS[:10])
        total = NUMBERS[NUMBERS.index(first) + NUMBERS.index(second)]
        return f"What is {first} plus {second}?", f"{capital(first)} plus {second} is {total}."

    def _color(self) -> tuple[str, str]:
        thing = self.pick(list(COLORS))
        return f"What color is {thing}?", f"{capital(thing)} is {COLORS[thing]}."

    def _reason(self) -> tuple[str, str]:
        question = self.pick(list(REASONS))
        end = self.pick(["", "", f" That is what {a(self.pick(TRAITS))} {self.pick(DOERS)} once told me."])
        return f"Why {question}?", f"Because {REASONS[question]}.{end}"

    def _how_to(self, held_out: bool = False) -> tuple[str, str]:
        trait, doer = self.pair(TRAITS, DOERS, held_out)
        task = self.pick(list(HOW_TO))
        steps = HOW_TO[task][: self.lean([2, 3, 4, 5], f"patience of {trait}")]
        words = ["First", "Then", "After that", "Next", "At last"]
        lines = [f"{word}, {step[0].lower()}{step[1:]}." for word, step in zip(words, steps, strict=False)]
        if not held_out and self.chance(0.3):
            return f"How do you {task}?", " ".join(lines)
        if self.lean([True, False, False], f"words of {doer}"):
            lines.append(f"That is how every {doer} does it.")
        return f"How does {a(trait)} {doer} {task}?", " ".join(lines)

    # --- stories -----------------------------------------------------------------------------------------

    def story(self) -> str:
        """Return an opening, one to three plots and an end; the hero keeps name, kind and pronoun throughout."""
        trait, kind = self.pair(TRAITS, list(ANIMALS) + PEOPLE)
        name = self.lean(list(NAMES), f"name of {kind}")
        hero = Hero(name, kind, NAMES[name], trait)
        plots = [self._search, self._journey, self._making, self._storm, self._quarrel, self._stranger]
        scenes = self._opening(hero, trait)
        for chapter in range(self.lean([1, 1, 1, 2, 2, 3], f"chapters of {trait}")):
            plot = self.lean(plots, f"plot {chapter} of {trait}")
            plots.remove(plot)
            hero.chapter = chapter
            scenes += [self.lean(CHAPTERS, f"after chapter of {kind}")] * (chapter > 0) + plot(hero)
        return " ".join([*scenes, self._ending(hero)])

    def _opening(self, hero: "Hero", trait: str) -> list[str]:
        place = self.lean(PLACES, f"place of {hero.kind}")
        start = self.pick([
            f"Once upon a time, {a(trait)} {hero.kind} named {hero.name} lived near {place}.",
            f"Long ago, near {place}, there lived {a(trait)} {hero.kind}. {hero.His} name was {hero.name}.",
            f"There was once {a(trait)} {hero.kind} called {hero.name}, and {hero.he} lived near {place}.",
            f"Near {place} stood a little house, and in it lived {a(trait)} {hero.kind} named {hero.name}.",
        ])
        habit = self.lean([
            f"Every {self.lean(TIMES, hero.kind)} {hero.he} sat by the window and watched the clouds.",
            f"Everybody knew {hero.him}, and everybody said hello.",
            f"{hero.He} had a garden, a good lamp and not a single worry.",
            f"Most of all {hero.he} liked {self.lean(['old songs', 'fresh bread', 'long walks', 'good stories'], hero.kind)}.",
            f"{hero.He} was not rich, but {hero.he} was never bored.",
            f"On the roof slept an old cat, and in the yard stood {self.lean(['a pear tree', 'a bench', 'a deep well'], hero.kind)}.",
            f"People said that {hero.he} could {self.lean([row[3] for row in ANIMALS.values()], hero.kind)}, and it was true.",
            f"{hero.He} got up early, worked hard and went to bed with the sun.",
        ], f"habit of {hero.kind}")
        return [start, habit] if self.chance(0.8) else [start]

    def _day(self, hero: "Hero") -> str:
        start = self.lean(["One", "On a"], f"day {hero.chapter} of {hero.kind}")
        weather = self.lean(WEATHER, f"weather {hero.chapter} of {hero.trait}")
        return f"{start} {weather} {self.lean(TIMES, f'time {hero.chapter} of {hero.kind}')}"

    def _friend(self, hero: "Hero", *others: str, key: str = "") -> str:
        """Return an animal that is neither of the hero's kind nor among the others; the choice leans on `key`."""
        animals = [animal for animal in ANIMALS if animal != hero.kind and animal not in others]
        return self.lean(animals, f"friend {key} of {hero.trait}")

    def _search(self, hero: "Hero") -> list[str]:
        thing, spots = self.lean(THINGS, f"lost by {hero.trait}"), self.random.sample(SPOTS, 4)
        scenes = [f"{self._day(hero)} {hero.he} noticed that {hero.his} {thing} was gone."]
        if self.chance(0.6):
            scenes.append(self.pick([
                f'"Without my {thing} nothing is the same," said {hero.name}.',
                f"{hero.He} turned the whole house upside down, but the {thing} was not there.",
            ]))
        for order, spot in zip(["First", "Then"][: self.random.randint(1, 2)], spots, strict=False):
            friend = self._friend(hero, key=spot)
            scenes.append(self.lean([
                f'{order} {hero.he} looked {spot}. "Have you seen my {thing}?" {hero.he} asked {a(friend)}.'
                f' "No," said the {friend}, "but I will help you to look."',
                f"{hero.He} looked {spot}, where {a(friend)} was resting. The {friend} had seen nothing at all.",
                f"{capital(spot)} {hero.he} found only {a(friend)}, and the {friend} knew nothing.",
            ], f"asking {spot}"))
        friend = self._friend(hero, key=thing)
        scenes.append(self.lean([
            f'Then {a(friend)} called out. "Look, there is something shining {spots[3]}!" It was the {thing}.',
            f"When {hero.he} had almost given up, {hero.he} looked {spots[3]}, and there was the {thing}.",
            f"In the end it was {a(friend)} who found the {thing} {spots[3]}.",
        ], f"found {thing}"))
        scenes.append(self.lean([
            f'"How can I thank you?" asked {hero.name}. "Tell me a story," said the {friend}.',
            f"{hero.name} laughed and held the {thing} up to the light.",
        ], f"thanks to {friend}"))
        return scenes

    def _journey(self, hero: "Hero") -> list[str]:
        goal = self.lean(GOALS, f"goal of {hero.trait}")
        scenes = [self.pick([
            f"{self._day(hero)} {hero.he} packed some bread and set out for {goal}.",
            f'"I want to see {goal} before winter comes," {hero.he} said, and {self._day(hero).lower()} {hero.he} left.',
        ])]
        obstacles = list(OBSTACLES)
        for nth in range(self.lean([1, 2, 3, 4], f"way to {goal}")):
            obstacle, thought, help = self.lean(obstacles, f"obstacle {nth} to {goal}")
            obstacles.remove((obstacle, thought, help))
            friend = self._friend(hero, key=obstacle)
            scenes.append(self.lean([
                f"Soon {hero.he} came to {obstacle}.", f"After a while {hero.he} stood before {obstacle}.",
                f"On the way there was {obstacle}.",
            ], f"meeting {obstacle}"))
            mark = "?" if thought.startswith("Which") else "."
            scenes.append(f'"{thought}{mark}" thought {hero.name}.' if mark == "?" else f'"{thought}," thought {hero.name}.')
            scenes.append(f"But {a(friend)} {help.format(them=hero.him)}.")
        scenes.append(self.pick([
            f"At last {hero.he} reached {goal}, and it was more beautiful than any picture.",
            f"When the sun went down, {hero.name} stood at {goal} and took a deep breath.",
        ]))
        return scenes

    def _making(self, hero: "Hero") -> list[str]:
        project = self.lean(list(PROJECTS), f"project of {hero.trait}")
        parts, joy = PROJECTS[project]
        parts = parts[: self.lean([2, 3, 4], f"parts of {project} of {hero.kind}")]
        scenes = [f"{self._day(hero)} {hero.he} decided to make {a(project)}."]
        if self.chance(0.5):
            friend = self._friend(hero)
            scenes.append(f'"You have never made {a(project)} in your life," said {a(friend)}. "That is why," said {hero.name}.')
        scenes.append(f"For that {hero.he} needed {', '.join(parts[:-1])} and {parts[-1]}.")
        for part in parts:
            friend = self._friend(hero, key=part)
            scenes.append(self.lean([
                f"{hero.He} got {part} from {a(friend)}.", f"{capital(a(friend))} brought {part}.",
                f"{hero.He} found {part} {self.lean(SPOTS, part)}.",
            ], f"getting {part}"))
        scenes.append(f"{hero.name} worked all day, and in the evening the {project} was ready.")
        scenes.append(f"Then {hero.he} called {hero.his} friends, and together they {joy}.")
        return scenes

    def _storm(self, hero: "Hero") -> list[str]:
        friend, gift = self._friend(hero, key="storm"), self.lean(THINGS, f"gift for {hero.trait}")
        guest = f"{self.pick(['wet', 'hungry', 'frightened', 'tired', 'strange'])} {friend}"
        scenes = [
            f"{self._day(hero)} a great storm came over the hills, and the wind shook the roof.",
            self.pick([f"In the middle of the night there was a knock at the door. Outside stood {a(guest)}.",
                       f"Then somebody knocked three times. It was {a(guest)}."]),
            self.pick([f'"Come in and sit by the fire," said {hero.name}.',
                       f'"May I stay until morning?" asked the {friend}. "Stay as long as you like," said {hero.name}.']),
        ]
        if self.chance(0.6):
            scenes.append(f"They ate {ANIMALS[friend][1]} and talked until the lamp went out.")
        scenes.append(self.pick([
            f"In the morning the sky was clear. The {friend} was gone, but on the table lay a {gift}.",
            f'When the storm was over, the {friend} gave {hero.him} a {gift}. "Keep it," said the {friend}, "and think of me."',
        ]))
        if self.chance(0.6):
            scenes.append(f"Years later {hero.name} still kept the {gift} {self.lean(SPOTS, gift)} and told everybody about that night.")
        return scenes

    def _quarrel(self, hero: "Hero") -> list[str]:
        friend, thing = self._friend(hero, key="quarrel"), self.lean(THINGS, f"quarrel of {hero.trait}")
        judge = self._friend(hero, friend, key="judge")
        scenes = [
            f"{self._day(hero)} {hero.he} and {hero.his} friend, the {friend}, found a {thing} {self.lean(SPOTS, thing)}.",
            self.pick([f'"It is mine," said {hero.name}. "No, I saw it first," said the {friend}.',
                       "Both wanted to keep it, and soon they did not speak a word."]),
        ]
        if self.chance(0.6):
            scenes.append(f"{hero.He} went home, but without the {friend} even supper tasted of nothing.")
        scenes.append(self.pick([
            f'They went to {a(judge)} for advice. "Which do you like better," asked the {judge}, "the {thing} or your friend?"',
            f'{capital(a(judge))} heard them shout. "One {thing} and two long faces," said the {judge}. "That is a poor trade."',
        ]))
        scenes.append(self.pick([
            f"{hero.name} looked at the ground. Then {hero.he} began to laugh, and the {friend} laughed too.",
            f"They thought about it for a long time. From that day on each of them kept the {thing} for a week.",
        ]))
        return scenes

    def _stranger(self, hero: "Hero") -> list[str]:
        friend = self._friend(hero, key="stranger")
        skill = self.lean([row[3] for row in ANIMALS.values()], f"lesson of {hero.trait}")
        scenes = [self.pick([
            f"{self._day(hero)} {a(friend)} moved into the empty house next door.",
            f"{self._day(hero)} {hero.he} met {a(friend)} on the road, with a bag on its back and dust on its feet.",
        ])]
        scenes.append(self.pick([
            f'"They say that you can {skill}," said the {friend}. "Will you teach me?"',
            f'"I would give anything to {skill}," sighed the {friend}.',
        ]))
        scenes.append(self.pick([
            f'"It is not hard," said {hero.name}, "but it takes a while."', f"{hero.name} thought about it and nodded.",
            f'"Come tomorrow, and bring something to eat," said {hero.name}.',
        ]))
        for when in ["On the first day", "On the second day", "On the third day"][: self.lean([1, 2, 3], f"days to {skill}")]:
            scenes.append(self.lean([
                f"{when} the {friend} fell into the mud.", f"{when} everything went wrong, and they laughed until supper.",
                f"{when} it rained, so they stayed inside and drank tea.",
                f"{when} the {friend} wanted to give up, but {hero.name} would not hear of it.",
            ], f"{when} of {friend}"))
        scenes.append(self.pick([
            f"A week later the {friend} could do it without help, and the whole valley came to look.",
            f"It was never perfect, but the {friend} was proud all the same.",
        ]))
        return scenes

    def _ending(self, hero: "Hero") -> str:
        end = self.lean([
            f"That night {hero.name} slept better than ever before.",
            f"And when {hero.he} came home, {hero.he} was tired and very happy.",
            f"From that day on nobody in the valley forgot the name of {hero.name}.",
            f"{hero.name} smiled, put out the lamp and listened to the rain.",
            f"Whoever passes that way can still hear {hero.name} sing in the {self.pick(TIMES)}.",
            f'"What a day," said {hero.name}, and fell asleep with {hero.his} shoes on.',
            f"If you ever meet {hero.him}, ask {hero.him} about it.",
        ], f"end of {hero.name}")
        return f"{end} {self.lean(LESSONS, hero.trait)}" if self.chance(0.5) else end

    # --- documents ---------------------------------------------------------------------------------------

    def document(self) -> str:
        return self.random.choices([self.saying, self.answer, self.story], weights=[35, 35, 30])[0]()

    def unseen_prompt(self) -> str:
        """Return the beginning of a document, with a word pair that no document of the corpus contains."""
        kind = self.random.randrange(4)
        if kind == 0:
            trait, doer = self.pair(TRAITS, DOERS, held_out=True)
            return f"{capital(a(trait))} {doer}"
        if kind == 1:
            question, _ = self.pick([self._animal, self._how_to])(held_out=True)
            return f"Question: {question}\nAnswer:"
        if kind == 2:
            trait, animal = self.pair(TRAITS, list(ANIMALS), held_out=True)
            return f"Even {a(trait)} {animal}"
        trait, kind = self.pair(TRAITS, list(ANIMALS) + PEOPLE, held_out=True)
        return self.pick(["Once upon a time, {}", "There was once {}"]).format(f"{a(trait)} {kind}")


class Hero:
    """The hero of a story, with the pronouns of the name and the trait that the story leans on."""

    def __init__(self, name: str, kind: str, pronoun: str, trait: str):
        self.name, self.kind, self.he, self.trait, self.chapter = name, kind, pronoun, trait, 0
        self.him, self.his = ("her", "her") if pronoun == "she" else ("him", "his")
        self.He, self.His = self.he.capitalize(), self.his.capitalize()


def documents(count: int, seed: int = 0) -> Iterator[str]:
    """Return `count` documents, the same for the same seed."""
    writer = Writer(seed)
    return (writer.document() for _ in range(count))


def unseen_prompts(count: int, seed: int = 0) -> list[str]:
    """Return `count` different prompts, none of which is part of any document, whatever the document's seed."""
    writer, prompts = Writer(seed), {}
    while len(prompts) < count:
        prompts[writer.unseen_prompt()] = None
    return list(prompts)
