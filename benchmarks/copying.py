"""Prompts whose answers are mostly copied from them, for `benchmarks/speculation.py`.

The embedded model follows no instructions, so the answers are written by hand, and a simulator generates them. The
number of passes with n-gram lookup depends on prompt and answer alone, so it is the same for every model that gives
these answers.
"""


def copying() -> list[tuple[str, str]]:
    """Return prompts that ask for an edit, a quote or an extract, each with the answer that a good model gives."""
    return [(f"{text}\n{task}\n", answer) for text, tasks in COPIED_FROM for task, answer in tasks]


COPIED_FROM = [
    (
        "In a cottage by the river lived a patient owl named Nora. Every morning she swept the floor, fed the hens and "
        'carried two buckets of water up the hill. One windy evening a tired fox knocked at the door. "May I stay '
        'until morning?" asked the fox. "Stay as long as you like," said Nora, and she put another log on the fire. '
        'When the storm was over, the fox gave her a small brass bell. "Ring it when you need a friend," he said.',
        [
            (
                "Edit: the owl is a badger named Otto.",
                "In a cottage by the river lived a patient badger named Otto. Every morning he swept the floor, fed "
                "the hens and carried two buckets of water up the hill. One windy evening a tired fox knocked at the "
                'door. "May I stay until morning?" asked the fox. "Stay as long as you like," said Otto, and he put '
                'another log on the fire. When the storm was over, the fox gave him a small brass bell. "Ring it when '
                'you need a friend," he said.',
            ),
            (
                "Quote what Nora and the fox say.",
                'The fox asks: "May I stay until morning?" Nora says: "Stay as long as you like." The fox says: '
                '"Ring it when you need a friend."',
            ),
            (
                "Extract what Nora did every morning.",
                "Every morning she swept the floor, fed the hens and carried two buckets of water up the hill.",
            ),
        ],
    ),
    (
        "Minutes of the village meeting. The bridge: two planks are loose, and Tom will nail them down before Sunday. "
        "The well: the rope is worn, and Lena will buy a new one at the market in June. The school: the roof leaks "
        "over the second window, and Jonas will ask the carpenter for a price. The harvest feast: it takes place on "
        "the last Saturday of September, and every house brings a dish for ten people.",
        [
            (
                "Edit: write it for the board, with one line for each point.",
                "- The bridge: two planks are loose. Tom will nail them down before Sunday.\n"
                "- The well: the rope is worn. Lena will buy a new one at the market in June.\n"
                "- The school: the roof leaks over the second window. Jonas will ask the carpenter for a price.\n"
                "- The harvest feast: it takes place on the last Saturday of September. Every house brings a dish for "
                "ten people.",
            ),
            (
                "Quote what is said about the well and about the school.",
                '"The well: the rope is worn, and Lena will buy a new one at the market in June." "The school: the '
                'roof leaks over the second window, and Jonas will ask the carpenter for a price."',
            ),
            (
                "Extract who does what.",
                "Tom will nail them down before Sunday. Lena will buy a new one at the market in June. Jonas will ask "
                "the carpenter for a price.",
            ),
        ],
    ),
    (
        "def add_row(rows, name, weight, price):\n    if weight <= 0:\n        raise ValueError(name)\n"
        '    rows.append({"name": name, "weight": weight, "price": price})\n    return rows\n\n'
        'def total_price(rows):\n    total = 0\n    for row in rows:\n        total += row["weight"] * '
        'row["price"]\n    return total\n',
        [
            (
                "Edit: rename weight to kilos.",
                "def add_row(rows, name, kilos, price):\n    if kilos <= 0:\n        raise ValueError(name)\n"
                '    rows.append({"name": name, "kilos": kilos, "price": price})\n    return rows\n\n'
                'def total_price(rows):\n    total = 0\n    for row in rows:\n        total += row["kilos"] * '
                'row["price"]\n    return total\n',
            ),
            ("Quote the line that adds to the total.", '        total += row["weight"] * row["price"]\n'),
            (
                "Extract the function total_price.",
                'def total_price(rows):\n    total = 0\n    for row in rows:\n        total += row["weight"] * '
                'row["price"]\n    return total\n',
            ),
        ],
    ),
]
