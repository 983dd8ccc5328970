"""Answers to the exercises of lesson 6."""

import math
from collections import Counter
from hashlib import sha256

import numpy as np

from answers import right, solutions, wrong
from helpers.engine import BlockManager, Sequence
from helpers.runners.kv_pool import slot_mapping

# --- unused_room ----------------------------------------------------------------------------------------------------


@right("unused_room")
def with_ceil(lengths, block_size):
    return sum(math.ceil(length / block_size) for length in lengths) * block_size - sum(lengths)


@right("unused_room")
def in_numpy(lengths, block_size):
    return (-np.array(lengths) % block_size).sum()


@right("unused_room")
def block_by_block(lengths, block_size):
    unused = 0
    for length in lengths:
        room = 0
        while room < length:
            room += block_size
        unused += room - length
    return unused


@wrong("unused_room", "the result should be 5, and is 4 (given: lengths [6, 10, 3], blocks of 4)")
def last_request_forgotten(lengths, block_size):
    return solutions.unused_room(lengths[:-1], block_size)


@wrong("unused_room", "the result should be an int, and is a list")
def room_of_each(lengths, block_size):
    return [-length % block_size for length in lengths]


@wrong("unused_room", "the result should be an int, and is the float 5.0")
def room_as_a_float(lengths, block_size):
    return float(solutions.unused_room(lengths, block_size))


# --- slot_of --------------------------------------------------------------------------------------------------------


@right("slot_of")
def from_a_list_of_all_slots(table, position, block_size):
    slots = [block * block_size + place if block >= 0 else None for block in table for place in range(block_size)]
    return slots[position] if position < len(slots) else None


@right("slot_of")
def with_an_exception(table, position, block_size):
    try:
        block = table[position // block_size]
    except IndexError:
        return None
    return np.int64(block * block_size + position % block_size) if block != -1 else None


@wrong("slot_of", "the result should be None, and is 1")
def last_block_for_later_tokens(table, position, block_size):
    if not table or table[min(position // block_size, len(table) - 1)] == -1:
        return None
    return table[min(position // block_size, len(table) - 1)] * block_size + position % block_size


@wrong("slot_of", "the result should be an int, and is None")
def full_tables_only(table, position, block_size):
    return solutions.slot_of(table, position, block_size) if -1 not in table else None


@wrong("slot_of", "the result should be an int, and is the float 29.0")
def slots_as_floats(table, position, block_size):
    slot = solutions.slot_of(table, position, block_size)
    return slot if slot is None else float(slot)


@wrong("slot_of", "stopped with TypeError in line")
def true_division(table, position, block_size):
    return table[position / block_size] * block_size + position % block_size


@wrong("slot_of", "the result should be an int, and is a tuple")
def block_and_place(table, position, block_size):
    slot = solutions.slot_of(table, position, block_size)
    return slot if slot is None else divmod(slot, block_size)


@wrong("slot_of", "calls the course's own `slot_mapping`")
def the_course_s_slots(table, position, block_size):
    place = position // block_size
    return (
        None if table[place : place + 1] in ([], [-1]) else slot_mapping(table, block_size, position, position + 1)[0]
    )


# --- allocate -------------------------------------------------------------------------------------------------------


@right("allocate")
def block_after_block(free, tables, request, tokens, block_size):
    table, new, spare = tables.get(request, []), [], list(free)
    while (len(table) + len(new)) * block_size < tokens:
        if not spare:
            return None
        new.append(spare.pop())  # which of them makes no difference
    tables[request], free[:] = table + new, spare
    return new


@right("allocate")
def with_slices(free, tables, request, tokens, block_size):
    needed = math.ceil(tokens / block_size) - len(tables.get(request, ()))
    if len(free) >= needed:
        new = sorted(free)[len(free) - needed :]
        tables.setdefault(request, []).extend(new)
        free[:] = [block for block in free if block not in new]
        return new


def allocated(free, tables, request, tokens, block_size, take):
    """Allocate as the solution does, but for the blocks that are taken."""
    table = tables.get(request, [])
    missing = -(-tokens // block_size) - len(table)
    if missing > len(free):
        return None
    new = take(free, missing)
    tables[request] = table + new
    return new


@wrong("allocate", "`tables['c']` should be [3, 7, 1], and is [3, 7, 1, 5]")
def takes_all(*arguments):
    return allocated(*arguments, take=lambda free, missing: [free.pop(0) for _ in range(len(free))] if missing else [])


@wrong("allocate", "has block 3 in a table and in `free`: the next request would overwrite keys")
def given_out_and_still_free(*arguments):
    return allocated(*arguments, take=lambda free, missing: free[:missing])


@wrong("allocate", "has block 3 in a table twice: tokens would overwrite each other")
def one_block_twice(*arguments):
    return allocated(*arguments, take=lambda free, missing: [free.pop(0)] * missing if missing else [])


@wrong("allocate", "loses the blocks [3, 7]: they are in no table and not in `free`")
def numbers_instead_of_blocks(*arguments):
    def first_numbers(free, missing):
        del free[:missing]
        return list(range(missing))

    return allocated(*arguments, take=first_numbers)


@wrong("allocate", "loses the blocks [5]")
def free_is_emptied(*arguments):
    def first_and_all_gone(free, missing):
        first = free[:missing]
        free.clear()
        return first

    return allocated(*arguments, take=first_and_all_gone)


@wrong("allocate", "has [3, 7, 1] in the place of a block's number")
def list_in_a_table(free, tables, *request):
    new = solutions.allocate(free, tables, *request)
    if new:
        tables[request[0]] = [*tables[request[0]][: -len(new)], new]
    return new


@wrong("allocate", "refuses, and keeps blocks. All or nothing: what a refused request holds, no other can have")
def half_an_allocation(free, tables, request, tokens, block_size):
    new = []
    while len(tables.get(request, [])) * block_size < tokens:
        if not free:
            return None
        new.append(free.pop(0))
        tables[request] = [*tables.get(request, []), new[-1]]
    return new


@wrong("allocate", "refuses, and keeps blocks")
def taken_and_forgotten(free, tables, request, tokens, block_size):
    table, new = tables.get(request, []), []
    while (len(table) + len(new)) * block_size < tokens:
        if not free:
            return None
        new.append(free.pop(0))
    tables[request] = table + new
    return new


@wrong("allocate", "refuses, and leaves an empty table behind")
def table_before_asking(free, tables, request, *size):
    tables.setdefault(request, [])
    return solutions.allocate(free, tables, request, *size)


@wrong("allocate", "promises room that is not there")
def as_many_as_there_are(*arguments):
    table = arguments[1].get(arguments[2], [])
    new = [arguments[0].pop(0) for _ in range(min(-(-arguments[3] // arguments[4]) - len(table), len(arguments[0])))]
    arguments[1][arguments[2]] = table + new
    return new


@wrong("allocate", "`tables['a']` should be [0, 2, 3], and is [3, 2, 0]")
def sorted_table(free, tables, request, *size):
    new = solutions.allocate(free, tables, request, *size)
    if new:
        tables[request] = sorted(tables[request], reverse=True)
    return new


@wrong("allocate", "changes the table of 'a', and this was about 'b'")
def takes_from_the_last(free, tables, request, *size):
    new = solutions.allocate(free, tables, request, *size)
    *_, last = tables
    tables[last] = tables[last][: 1 if last != request else None]
    return new


@wrong("allocate", "says only whether there is room")
def the_lesson_s_cell(free, tables, request, tokens, block_size):
    table = tables.get(request, [])
    missing = -(-tokens // block_size) - len(table)
    if missing > len(free):
        return False
    tables[request] = table + [free.pop(0) for _ in range(missing)]
    return True


# --- release --------------------------------------------------------------------------------------------------------


@right("release")
def block_by_block_unless_shared(free, tables, request):
    for block in reversed(tables[request]):
        if sum(block in table for table in tables.values()) == 1:
            free.insert(0, block)
    del tables[request]


@right("release")
def by_counting_references(free, tables, request):
    references = Counter(block for table in tables.values() for block in table)
    for block in tables.pop(request):
        references[block] -= 1
        if references[block] == 0:
            free.append(block)
    return True


@wrong("release", "has block 0 in `free` twice: two requests would get it")
def freed_twice(free, tables, request):
    table = tables[request]
    solutions.release(free, tables, request)
    free += [block for block in table if block in free]


@wrong("release", "changes the table of 'b', and this was about 'a'")
def shared_blocks_taken_away(free, tables, request):
    table = tables.pop(request)
    free.extend(table)
    for name, other in tables.items():
        tables[name] = [block for block in other if block not in table]


@wrong("release", "has block 1 in a table and in `free`")
def compared_with_the_first_table(free, tables, request):
    free += set(tables.pop(request)).difference(next(iter(tables.values()), []))


@wrong("release", "loses the blocks [4]")
def free_replaced(free, tables, request):
    before = list(free)
    solutions.release(free, tables, request)
    free[:] = [block for block in free if block not in before]


@wrong("release", "has a block 10, which was neither free nor in a table")
def other_numbers_freed(free, tables, request):
    free.extend(range(10, 10 + len(tables.pop(request))))


# --- prefix_hashes --------------------------------------------------------------------------------------------------


@right("prefix_hashes")
def with_sha256(token_ids, block_size, salt):
    name, names = salt, []
    for end in range(block_size, len(token_ids) + 1, block_size):
        name = sha256(f"{name}{token_ids[end - block_size : end]}".encode()).hexdigest()
        names.append(name)
    return names


@right("prefix_hashes")
def everything_before_as_the_name(token_ids, block_size, salt):
    """No hash at all, and as good as one, but for its length."""
    return [(salt, *token_ids[:end]) for end in range(block_size, len(token_ids) + 1, block_size)]


KNOWN = {}


@right("prefix_hashes")
def numbers_from_a_dict(token_ids, block_size, salt):
    prefixes = everything_before_as_the_name(token_ids, block_size, salt)
    return [KNOWN.setdefault(prefix, len(KNOWN)) for prefix in prefixes]


@wrong("prefix_hashes", "calls the course's own `BlockManager._hashes`")
def the_engine_s_own_chain(token_ids, block_size, salt):
    return [(salt, name) for name in BlockManager(1, block_size)._hashes(Sequence(0, token_ids, 1), len(token_ids))]


@wrong("prefix_hashes", "ignores the salt")
def the_lesson_s_cell_renamed(token_ids, block_size, salt):
    return with_sha256(token_ids, block_size, "")


def chain(token_ids, size, salt, name):
    names, before = [], salt
    for end in range(size, len(token_ids) + 1, size):
        before = name(before, token_ids[end - size : end])
        names.append(before)
    return names


@wrong(
    "prefix_hashes", "gives the same name to block 1 of [7, 3, 9, 1, 5, 5, 2, 8, 6, 4, 1, 3] with salt 'x' and block 1"
)
def sums_of_names(token_ids, block_size, salt):
    return chain(token_ids, block_size, hash(salt), lambda before, block: before + hash(tuple(block)))


@wrong("prefix_hashes", "up to their ends something differs")
def first_block_and_own(token_ids, block_size, salt):
    first = tuple(token_ids[:block_size])
    return [
        (salt, first, number, own) for number, own in enumerate(chain(token_ids, block_size, "", lambda _, b: (*b,)))
    ]


@wrong("prefix_hashes", "up to their ends something differs")
def last_token_of_each_block(token_ids, block_size, salt):
    return chain(token_ids, block_size, salt, lambda before, block: hash((before, block[-1])))


@wrong("prefix_hashes", "up to their ends all is the same")
def the_whole_text_in_every_name(token_ids, block_size, salt):
    whole = tuple(token_ids[: len(token_ids) // block_size * block_size])
    return chain(token_ids, block_size, salt, lambda before, block: hash((before, whole, *block)))


@wrong("prefix_hashes", "has a list for a name, which cannot be the key of a dict")
def lists_as_names(token_ids, block_size, salt):
    return [token_ids[:end] for end in range(block_size, len(token_ids) + 1, block_size)]


@wrong("prefix_hashes", "should return a list of names, and returned a set")
def a_set_of_names(token_ids, block_size, salt):
    return set(with_sha256(token_ids, block_size, salt))


@wrong("prefix_hashes", "names 0 blocks of [1, 2, 3], and 1 of its blocks of 3 are full")
def blocks_of_four(token_ids, block_size, salt):
    return with_sha256(token_ids, 4, salt)


@wrong("prefix_hashes", "`token_ids` is not what it was")
def consumes_the_text(token_ids, block_size, salt):
    names = with_sha256(token_ids, block_size, salt)
    del token_ids[: len(names) * block_size]
    return names
