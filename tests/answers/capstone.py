"""Engines for the capstone: two that are written otherwise than the solution, and wrong ones.

A wrong engine is the solution with a few lines changed, so it fails for its one mistake.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import count

from answers import RIGHT, WRONG, right
from handing_in import answers_of

from helpers.checks import Row

SOLUTION = answers_of("18_capstone_engine")["MyEngine"]
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
    """Lesson 3's loop: batches are dicts, prefills and decodes take turns, and each row owns an equal part of memory."""

    def __init__(self, model, max_rows, max_tokens_per_step):
        self.model, self.queue, self.batch = model, [], {"rows": [], "ids": []}
        share = model.num_blocks // max_rows
        self.places = [list(range(row * share, (row + 1) * share)) for row in range(max_rows)]

    def add_request(self, *request):
        self.queue.append(request)

    def step(self):
        joining = self.queue[: len(self.places)]
        del self.queue[: len(joining)]
        if joining:
            new = self.generate_next_token(self.init_batch(joining))
            self.batch = {key: self.batch[key] + new[key] for key in new}  # merge_batches
        else:
            self.batch = self.generate_next_token(self.batch)
        return self.filter_batch()

    def init_batch(self, requests):
        rows = [{"id": name, "ids": list(prompt), "left": most, "out": [], "at": 0, "place": self.places.pop()}
                for name, prompt, most in requests]  # fmt: skip
        return {"rows": rows, "ids": [row["ids"] for row in rows]}

    def generate_next_token(self, batch):
        tokens = self.model.forward(
            [Row(row["id"], row["at"], ids, row["place"]) for row, ids in zip(batch["rows"], batch["ids"], strict=True)]
        )
        rows = [
            row | {"at": row["at"] + len(ids), "left": row["left"] - 1, "out": [*row["out"], token]}
            for row, ids, token in zip(batch["rows"], batch["ids"], tokens, strict=True)
        ]
        return {"rows": rows, "ids": [[token] for token in tokens]}

    def filter_batch(self):
        ended = [row for row in self.batch["rows"] if row["left"] == 0 or row["out"][-1] == self.model.eos_id]
        self.places += [row["place"] for row in ended]
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
                                     "done": 0, "blocks": []}  # fmt: skip

    def step(self):
        plan, budget = {}, self.budget
        everyone = sorted(self.requests, key=lambda name: self.requests[name]["n"])
        live = [name for name in everyone if self.requests[name]["blocks"]]
        asking = sorted(live, key=lambda name: len(self.requests[name]["text"]) - self.requests[name]["done"] > 1)
        lost = set()
        for name in [*asking, *(name for name in everyone if name not in live)]:
            if name in lost or budget == 0:
                continue
            is_new = name not in live
            if is_new and (lost or len(live) - len(lost) >= self.rows):
                break
            one = self.requests[name]
            if is_new:
                self.reuse(one)
            tokens = min(len(one["text"]) - one["done"], budget)
            while not self.cover(one, one["done"] + tokens):
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
                self.drop(one)
                break
        return self.compute(plan)

    def compute(self, plan):
        size, outputs, rows = self.model.block_size, {}, []
        for name, tokens in plan.items():
            one = self.requests[name]
            rows.append(Row(name, one["done"], list(one["text"][one["done"] : one["done"] + tokens]), one["blocks"]))
        for row, token in zip(rows, self.model.forward(rows), strict=True):
            one = self.requests[row.request_id]
            one["done"] += len(row.token_ids)
            before = None
            for place in range(one["done"] // size):
                before = (before, one["text"][place * size : (place + 1) * size])
                self.memory.learn(one["blocks"][place], before)
            if one["done"] == len(one["text"]):
                one["text"], one["out"] = (*one["text"], token), one["out"] + 1
                if token == self.model.eos_id or one["out"] == one["room"]:
                    outputs[row.request_id] = list(one["text"][-one["out"] :])
                    self.drop(self.requests.pop(row.request_id))
        return outputs

    def reuse(self, one):
        size, before = self.model.block_size, None
        for start in range(0, len(one["text"]) - size, size):
            before = (before, one["text"][start : start + size])
            block = self.memory.find(before)
            if block is None:
                return
            one["blocks"].append(block)
            one["done"] += size

    def cover(self, one, tokens):
        while len(one["blocks"]) * self.model.block_size < tokens:
            block = self.memory.take()
            if block is None:
                return False
            one["blocks"].append(block)
        return True

    def drop(self, one):
        for block in reversed(one["blocks"]):
            self.memory.give_back(block)
        one["blocks"], one["done"] = [], 0


# --- wrong engines ----------------------------------------------------------------------------------------------------

ROW = "Row(one.id, one.computed, one.tokens[one.computed : one.computed + count], one.table)"
ENDS = "if token == self.model.eos_id or len(output) == request.max_new_tokens:"
OUTPUT = "outputs[request.id] = output"
JOINS = "while self.waiting and len(self.running) < self.max_rows and left and not short_of_memory:"
LEAVES = "                    self.running.remove(request)\n                    self.release(request)\n"
ARRIVES = "self.waiting.append(Request(request_id, list(prompt), len(prompt), max_new_tokens))"
PREEMPTED = "                self.release(newest)\n"
STATIC = (JOINS, JOINS.replace(":", " and not decodes_first:"))

MUTANTS = {
    "engine_cached": {
        "computes tokens again whose keys are in the cache": [
            (ROW, "Row(one.id, 0, one.tokens[: one.computed + count], one.table)")
        ],
        "EOS is missing": [(OUTPUT, "outputs[request.id] = [one for one in output if one != self.model.eos_id]")],
        "goes on after EOS": [(ENDS, "if len(output) == request.max_new_tokens:")],
        "the pass over the prompt yields the first of them": [(ENDS, ENDS.replace("==", ">").replace(">", "==", 1))],
        "does not contain the prompt": [(OUTPUT, "outputs[request.id] = request.tokens")],
        "the newest token is at the last of them": [(ROW, ROW.replace("one.computed,", "one.computed + (count == 1),", 1))],
        "whatever its prompt holds": [(ENDS, ENDS.replace("token == self.model.eos_id", "self.model.eos_id in request.tokens"))],
        "max_new_tokens counts generated tokens": [(ENDS, ENDS.replace("len(output) ==", "1 + len(output) >="))],
    },
    "engine_static": {
        "runs one request at a time": [(JOINS, JOINS.replace("len(self.running) < self.max_rows", "not self.running"))],
        "know them by their ids": [
            (ARRIVES, f"if all(one.tokens != prompt for one in self.waiting): {ARRIVES}")
        ],
        "in the order of the rows": [("self.model.forward(passed)", "reversed(self.model.forward(passed))")],
        "has written to that block": [("block = self.free.pop(0)", "block = len(request.table)")],
        "whenever others end": [(ENDS, ENDS.replace(":", " or outputs:"))],
        "leaves rows free in its passes": [(JOINS, JOINS.replace(":", " and not decodes_first and len(rows) + 1 < self.max_rows:"))],
        "computes rows of requests that have finished": [
            STATIC,
            (OUTPUT, "outputs[request.id] = output; request.max_new_tokens = 0"),
            (LEAVES, ""),
            ("        return outputs\n", "        if not any(one.max_new_tokens for one in self.running):\n"
             "            while self.running: self.release(self.running.pop())\n        return outputs\n"),
            (ENDS, ENDS.replace(":", " if request.max_new_tokens else False:")),
        ],
    },
    "engine_continuous": {
        "waits until all rows have finished": [STATIC],
        "the server has memory and time for max_rows": [(JOINS, JOINS.replace("<", "<="))],
        "in the step in which it ends": [(OUTPUT, "outputs.update({request.id: output} if count == 1 else {})")],
        "leaves rows free in its passes": [(JOINS, JOINS.replace(" < self.max_rows", " + 1 < self.max_rows"))],
        "`start` is the place": [(ROW, ROW.replace("one.computed,", "max(each.computed for each in rows),", 1))],
        "A block belongs to one request": [(LEAVES, f"{LEAVES}                    self.free = [block for one in self.running for block in one.table] + self.free\n")],
    },
    "engine_chunked": {
        "All tokens of a pass count": [
            ("            rows[request] = tokens\n            left -= tokens\n        return", "            rows[request] = tokens\n        return")
        ],
        "the one of each decode": [("                left -= tokens\n", "                left -= tokens * (tokens > 1)\n")],
        "it is computed in chunks": [
            ("            if not self.grow(request, request.computed + tokens):\n                self.release",
             "            if tokens < request.uncomputed or not self.grow(request, request.computed + tokens):\n                self.release"),
        ],
        "A chunk of a prompt yields no token": [("if request.uncomputed == 0:", "if True:")],
        "`start` is the place": [(ROW, ROW.replace("one.computed,", "one.computed if count == 1 else 0,", 1))],
        "Decodes come first in every pass": [("request.uncomputed > 1)", "request.uncomputed == 1)")],
        "prompts are computed in what is left": [
            ("        for request in decodes_first:\n", "        for request in [r for r in decodes_first if r.uncomputed > 1] or decodes_first:\n"),
        ],
        "computes smaller chunks of prompts than fit": [("            tokens = min(request.uncomputed, left)\n            while tokens", "            tokens = min(request.uncomputed, left, 2)\n            while tokens")],
    },
    "engine_paged": {
        "takes blocks before they are needed": [
            ("missing = -(-tokens //", "tokens = max(tokens, min(request.prompt_tokens + 12, request.prompt_tokens + request.max_new_tokens))\n        missing = -(-tokens //")
        ],
        "the newest running request is preempted": [
            ("                short_of_memory = True\n", "                short_of_memory = True\n                tokens = 0\n                continue\n")
        ],
        "without its blocks, a request has to be computed again": [(PREEMPTED, "                known = newest.computed; self.release(newest); newest.computed = known\n")],
        "generates tokens again after a preemption": [(PREEMPTED, f"{PREEMPTED}                del newest.tokens[newest.prompt_tokens :]\n")],
        "are all blocks of requests that finished": [(LEAVES, "                    self.running.remove(request)\n")],
        "preempts requests that have run longest": [("newest = self.running.pop()", "newest = self.running.pop(0)")],
        "is what was preempted in the queue again": [("                self.waiting.appendleft(newest)\n", "")],
        "is a block taken only when a token needs it": [("missing = -(-tokens // self.model.block_size)", "missing = tokens // self.model.block_size + 1")],
        "The tokens generated before it are part": [(PREEMPTED, f"{PREEMPTED}                newest.max_new_tokens -= len(newest.tokens) - newest.prompt_tokens\n                newest.prompt_tokens = len(newest.tokens)\n")],
    },
    "engine_prefixes": {
        "computes every prompt from its first token": [("            self.share(request)\n", "")],
        "A token's key depends on everything before it": [
            ("tuple(request.tokens[:end])", "tuple(request.tokens[end - size : end])"),
            ("tuple(request.tokens[: (number + 1) * size])", "tuple(request.tokens[number * size : (number + 1) * size])"),
        ],
        "Even if all of its text is cached": [("range(size, len(request.tokens), size)", "range(size, len(request.tokens) + 1, size)")],
        "has written to that block": [("            self.users[block] -= 1\n            if self.users[block] == 0:\n", "            if block not in self.free:\n"), ("            if self.users[block] == 0:\n                self.free.remove(block)\n", "            if block in self.free:\n                self.free.remove(block)\n")],
        "A block stays cached after its request has finished": [("                self.free.insert(", "                self.block_of.pop(self.text_of.pop(block, None), None)\n                self.free.insert(")],
        "can cached ones be evicted": [("                self.free.insert(len(self.free) if block in self.text_of else 0, block)", "                self.free += [block] * (block not in self.text_of)"), ("                self.free.remove(block)\n", "                pass\n")],
        "to several only if they share a full block": [
            ("            request.computed = end\n", "            request.computed = end\n        for end in range(len(request.tokens) - 1, request.computed, -1):\n"
             "            if (block := self.block_of.get(tuple(request.tokens[:end]))) is not None:\n                self.users[block] += 1\n"
             "                request.table.append(block)\n                request.computed = end\n                break\n"),
            ("        for number in range(request.computed // size):", "        if request.computed % size:\n            self.block_of[tuple(request.tokens[: request.computed])] = request.table[-1]\n        for number in range(request.computed // size):"),
        ],
    },
}  # fmt: skip

for _task, _mutants in MUTANTS.items():
    _without = [("            self.share(request)\n", "")] if _task == "engine_paged" else []
    WRONG[_task] |= {message: engine(*changes, *_without) for message, changes in _mutants.items()}
