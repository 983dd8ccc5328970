"""Engines for the capstone: two that are written otherwise than the solution, and wrong ones.

A wrong engine is the solution with a few lines changed, so it fails for its one mistake.
"""

import re
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from handing_in import CAPSTONE, answers_of

from answers import RIGHT, WRONG, right
from helpers.checks import Row

SOLUTION = answers_of(CAPSTONE)["MyEngine"]
MILESTONES = [f"engine_{name}" for name in ("cached", "static", "continuous", "chunked", "paged", "prefixes")]


def engine(*changes):
    """Return the solution's class, with pieces of its source replaced."""
    source = SOLUTION
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    names = {"deque": deque, "dataclass": dataclass, "field": field, "Row": Row}
    exec(source, names)
    return names["MyEngine"]


for _task in MILESTONES:
    RIGHT[_task]["the_solution"] = engine()


@right(*MILESTONES[:3])
class FourVerbs:
    """Lesson 3's loop: batches are dicts, prefills and decodes take turns, and each row owns a part of memory."""

    def __init__(self, model, max_rows, max_tokens_per_step):
        self.model, self.queue, self.batch = model, [], {"rows": [], "ids": []}
        share = model.num_blocks // max_rows
        self.memories = [list(range(row * share, (row + 1) * share)) for row in range(max_rows)]

    def add_request(self, *request):
        self.queue.append(request)

    def step(self):
        joining = self.queue[: len(self.memories)]
        del self.queue[: len(joining)]
        if joining:
            new = self.generate_next_token(self.init_batch(joining))
            self.batch = {key: self.batch[key] + new[key] for key in new}  # merge_batches
        else:
            self.batch = self.generate_next_token(self.batch)
        return self.filter_batch()

    def init_batch(self, requests):
        rows = [{"id": name, "ids": list(prompt), "left": most, "out": [], "at": 0, "blocks": self.memories.pop()}
                for name, prompt, most in requests]  # fmt: skip
        return {"rows": rows, "ids": [row["ids"] for row in rows]}

    def generate_next_token(self, batch):
        tokens = self.model.forward(
            [
                Row(row["id"], row["at"], ids, row["blocks"])
                for row, ids in zip(batch["rows"], batch["ids"], strict=True)
            ]
        )
        rows = [
            row | {"at": row["at"] + len(ids), "left": row["left"] - 1, "out": [*row["out"], token]}
            for row, ids, token in zip(batch["rows"], batch["ids"], tokens, strict=True)
        ]
        return {"rows": rows, "ids": [[token] for token in tokens]}

    def filter_batch(self):
        ended = [row for row in self.batch["rows"] if row["left"] == 0 or row["out"][-1] == self.model.eos_id]
        self.memories += [row["blocks"] for row in ended]
        rows = [row for row in self.batch["rows"] if row not in ended]
        self.batch = {"rows": rows, "ids": [row["out"][-1:] for row in rows]}
        return {row["id"]: row["out"] for row in ended}


class _Memory:
    """Blocks with counts of users, and a chain of names: (the name of the block before, the tokens of the block)."""

    def __init__(self, blocks):
        self.fresh, self.cold = set(range(blocks)), OrderedDict()  # cold: unused but known, coldest first
        self.users, self.known, self.name_of = {}, {}, {}

    def take(self):
        if self.fresh:
            block = self.fresh.pop()
        elif self.cold:
            block, _ = self.cold.popitem(last=False)
            del self.known[self.name_of.pop(block)]
        else:
            return None
        self.users[block] = 1
        return block

    def find(self, name):
        block = self.known.get(name)
        if block is not None:
            self.cold.pop(block, None)
            self.users[block] = self.users.get(block, 0) + 1
        return block

    def learn(self, block, name):
        if name not in self.known and block not in self.name_of:
            self.known[name], self.name_of[block] = block, name

    def give_back(self, block):
        self.users[block] -= 1
        if not self.users[block]:
            if block in self.name_of:
                self.cold[block] = None
            else:
                self.fresh.add(block)


@right(*MILESTONES)
class Planner:
    """One ragged pass per step: every live request asks for tokens in the order of arrival, decodes before prompts."""

    def __init__(self, model, max_rows, max_tokens_per_step):
        self.model, self.rows, self.budget = model, max_rows, max_tokens_per_step
        self.memory, self.requests, self.numbers = _Memory(model.num_blocks), {}, count()

    def add_request(self, request_id, prompt, max_new_tokens):
        self.requests[request_id] = {"n": next(self.numbers), "text": tuple(prompt), "room": max_new_tokens, "out": 0,
                                     "computed": 0, "blocks": []}  # fmt: skip

    def step(self):
        plan, budget = {}, self.budget
        everyone = sorted(self.requests, key=lambda name: self.requests[name]["n"])
        live = [name for name in everyone if self.requests[name]["blocks"]]
        asking = sorted(live, key=lambda name: len(self.requests[name]["text"]) - self.requests[name]["computed"] > 1)
        lost = set()
        for name in [*asking, *(name for name in everyone if name not in live)]:
            if name in lost or budget == 0:
                continue
            is_new = name not in live
            if is_new and (lost or len(live) - len(lost) >= self.rows):
                break
            request = self.requests[name]
            if is_new:
                self.reuse(request)
            tokens = min(len(request["text"]) - request["computed"], budget)
            while not self.cover(request, request["computed"] + tokens):
                newest = max((other for other in live if other not in lost), key=lambda o: self.requests[o]["n"])
                if is_new:
                    break
                lost.add(newest)
                budget += plan.pop(newest, 0)
                self.drop(self.requests[newest])
                if newest == name:
                    break
            else:
                plan[name] = tokens
                budget -= tokens
                if is_new:
                    live.append(name)
                continue
            if is_new:
                self.drop(request)
                break
        return self.compute(plan)

    def compute(self, plan):
        size, outputs, rows = self.model.block_size, {}, []
        for name, tokens in plan.items():
            request = self.requests[name]
            start, text = request["computed"], request["text"]
            rows.append(Row(name, start, list(text[start : start + tokens]), request["blocks"]))
        for row, token in zip(rows, self.model.forward(rows), strict=True):
            request = self.requests[row.request_id]
            request["computed"] += len(row.token_ids)
            before = None
            for number in range(request["computed"] // size):
                before = (before, request["text"][number * size : (number + 1) * size])
                self.memory.learn(request["blocks"][number], before)
            if request["computed"] == len(request["text"]):
                request["text"], request["out"] = (*request["text"], token), request["out"] + 1
                if token == self.model.eos_id or request["out"] == request["room"]:
                    outputs[row.request_id] = list(request["text"][-request["out"] :])
                    self.drop(self.requests.pop(row.request_id))
        return outputs

    def reuse(self, request):
        size, before = self.model.block_size, None
        for start in range(0, len(request["text"]) - size, size):
            before = (before, request["text"][start : start + size])
            block = self.memory.find(before)
            if block is None:
                return
            request["blocks"].append(block)
            request["computed"] += size

    def cover(self, request, tokens):
        while len(request["blocks"]) * self.model.block_size < tokens:
            block = self.memory.take()
            if block is None:
                return False
            request["blocks"].append(block)
        return True

    def drop(self, request):
        for block in reversed(request["blocks"]):
            self.memory.give_back(block)
        request["blocks"], request["computed"] = [], 0


# --- wrong engines ----------------------------------------------------------------------------------------------------


def _changes(text):
    """Yield (old, new) for each pair of removed and added lines."""
    for removed, added in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)*)", text, re.MULTILINE):
        yield tuple("\n" + re.sub("^.", "", lines, flags=re.MULTILINE) for lines in (removed, added))


for _text in re.split("^== ", Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
    _task, *_mutants = re.split(r"\n# ", f"{_text}\n")
    # An engine that preempts and shares nothing: cached blocks would make up for some mistakes.
    _base = [("            self.share(request)\n", "")] if _task.strip() == "engine_paged" else []
    for _mutant in _mutants:
        _message, _, _lines = _mutant.partition("\n")
        WRONG[_task.strip()][_message] = engine(*_changes(_lines), *_base)
