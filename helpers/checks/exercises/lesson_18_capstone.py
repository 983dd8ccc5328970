"""The capstone: one engine, judged six times, by a milestone each. Any engine that keeps its limits is right."""

from ..capstone import MILESTONES, SIGNATURE, judge
from ..exercise import JudgedExercise

engine_cached, engine_static, engine_continuous, engine_chunked, engine_paged, engine_prefixes = (
    JudgedExercise(SIGNATURE, milestone.idea, judge(milestone), milestone.name) for milestone in MILESTONES.values()
)
