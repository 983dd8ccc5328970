"""The exercises, by lesson: references, cases and misconceptions. A grader's sandbox does not contain this folder."""

from ..exercise import Exercise, JudgedExercise
from . import (
    codelab,
    codelab_eviction,
    conversation,
    design_memo,
    draft_budgets,
    fleet_memo,
    fleet_promise,
    iteration_plan,
    joining,
    leaving,
    lesson_1,
    lesson_2,
    lesson_3,
    lesson_4,
    lesson_5,
    lesson_6,
    lesson_7,
    lesson_8,
    lesson_9,
    lesson_10,
    lesson_11,
    lesson_12,
    load_testing,
    masking,
    serving_loop,
    shared_prefixes,
)

FILES = (
    *(lesson_1, conversation, lesson_2, lesson_3, joining, leaving, serving_loop, lesson_4, iteration_plan, codelab),
    *(lesson_5, codelab_eviction, lesson_6, shared_prefixes, design_memo, lesson_7, load_testing, lesson_8, masking),
    *(lesson_9, draft_budgets, lesson_10, lesson_11, lesson_12, fleet_promise, fleet_memo),
)
EXERCISES: dict[str, Exercise | JudgedExercise] = {
    one.name: one for file in FILES for one in vars(file).values() if isinstance(one, Exercise | JudgedExercise)
}
