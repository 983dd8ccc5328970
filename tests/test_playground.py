"""The playground runs the course's own files: its plans are an engine's, and its fleets are those of the simulator."""

import io
import math
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import playground
import playground_files
import playground_fleet
import pytest
from axe_playwright_python.sync_playwright import Axe

from helpers import Engine, load_model
from helpers.simulator.__main__ import main
from tests.support.browsing import serving

ROOT = Path(__file__).parents[1]
PHONE = {"width": 390, "height": 844}


def plans_of_an_engine(settings):
    """Return the plans of an engine that runs the embedded model."""
    run = playground.Playground(settings)
    run.engine = Engine(*load_model(), run.engine.config)
    while not run.finished:
        run.step()
    return run.engine.scheduler.plans


@pytest.mark.parametrize("name", playground.PRESETS)
def test_an_example_plans_what_an_engine_with_a_model_plans(name):
    plans = playground.run(playground.PRESETS[name])
    assert plans == plans_of_an_engine(playground.PRESETS[name])
    assert len(plans) > 20


def states_of(name, **changes):
    run = playground.Playground(playground.PRESETS[name] | changes)
    states = []
    while not run.finished:
        states.append(run.step())
    return states


def test_the_examples_show_what_their_names_promise_and_count_what_the_lessons_say_of_them():
    def num_tokens(state):
        return sum(chunk["tokens"] for chunk in state["plan"]["chunks"])

    runs = [states_of(name) for name in playground.PRESETS]
    static, continuous, longest, unchunked, chunked, preempted, shared = [states[-1]["counts"] for states in runs]
    most_tokens = [max(map(num_tokens, states)) for states in runs]
    assert static["row-steps without work"] > continuous["row-steps without work"] > longest["row-steps without work"]
    assert unchunked["tokens computed in prefills"] == chunked["tokens computed in prefills"]
    assert (most_tokens[3:5], [len(states) for states in runs[3:6]]) == ([43, 12], [42, 53, 131])
    assert preempted["preemptions"] > 0 == shared["preemptions"]
    enough = states_of("Too little memory: preemption (lesson 7)", blocks=36)
    assert (len(enough), enough[-1]["counts"]["preemptions"]) == (80, 0)
    assert shared["tokens computed in prefills"] < 10 * 24  # otherwise each of 10 requests computes the prefix


def test_the_examples_of_fleets_show_what_their_names_promise_and_count_what_the_lessons_say_of_them():
    def run(name, size=None, **changes):
        settings = playground_fleet.PRESETS[name] | changes
        return playground_fleet.run(settings, size) if size else playground_fleet.run(settings)

    def shares(name, *sizes):
        return [run(name, size)["within"] for size in sizes]

    assert shares("How many replicas? (lesson 18)", 2, 3) == [0.5675, 0.995]  # the limit is between them
    assert 0.5675 < playground_fleet.SHARE <= 0.995
    assert shares("A replica fails (lesson 17)", 3, 4) == [0.645, 1.0]
    assert shares("Shared prefixes in turn (lesson 17)", 4) == [0.85]
    assert shares("Shared prefixes stay together (lesson 17)", 4) == [0.915]
    assert shares("An autoscaler is late (lesson 18)", 4) == [0.98375]
    assert shares("Prefill and decode apart (lesson 18)", 1, 2) == [0.3525, 1.0]
    in_turn, by_load = (run(f"Bursts {way} (lesson 17)") for way in ("in turn", "by load"))
    assert in_turn["within"] < by_load["within"]


@pytest.mark.parametrize(
    "name", ["How many replicas? (lesson 18)", "Bursts in turn (lesson 17)", "Prefill and decode apart (lesson 18)"]
)
def test_a_fleet_is_what_the_command_beside_it_prints(name, capsys):
    settings = playground_fleet.DEFAULTS | playground_fleet.PRESETS[name]
    program, arguments = playground_fleet.command(settings).split("helpers.simulator ")
    assert program == "python -m " and main(shlex.split(arguments)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    printed = {line[0]: line for line in lines if line and line[0][0].isdigit()}
    for size in range(1, settings["replicas"] + 1):
        shown = playground_fleet.run(settings, size)
        expected = [f"{shown['goodput']:.3g}", f"{shown['within']:.1%}", *(f"{value:.3g}" for value in shown["ttft"])]
        assert printed[shown["name"]][2:6] == expected
        assert f"{shown['busy']:.0%}" in printed[shown["name"]]


def test_the_files_on_the_site_are_enough_to_run_the_engine_and_a_fleet(tmp_path):
    zipfile.ZipFile(io.BytesIO(playground_files.course_zip())).extractall(tmp_path)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import playground; print(len(playground.run()))"
    program += "; import playground_fleet; print(playground_fleet.run()['goodput'])"
    program += "; print(sorted({'torch', 'numpy', 'tqdm'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, cwd=tmp_path)
    expected = [str(len(playground.run())), str(playground_fleet.run()["goodput"]), "[]"]
    assert result.stdout.split("\n")[:3] == expected, result.stderr


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Serve a page with nothing but the playground, and return its address."""
    files, reason = playground_files.playground(ROOT / "build" / "cache")
    if reason:
        (pytest.fail if os.environ.get("CI_BROWSER") == "1" else pytest.skip)(f"No playground: {reason}.")
    folder = tmp_path_factory.mktemp("playground")
    for name, content in files.items():
        target = folder / "_static" / "playground" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    html = re.search(r"```\{raw\} html\n(.*?)```", (ROOT / "docs" / "playground.md").read_text(), re.DOTALL)[1]
    (folder / "docs").mkdir()
    icon = '<link rel="icon" href="data:,">'
    (folder / "docs" / "playground.html").write_text(f'<!doctype html><meta charset="utf-8">{icon}{html}')
    with serving(folder) as address:
        yield address


@pytest.fixture
def playground_page(window, address):
    """Open the playground, at an example's anchor if one is named, and wait until it can be used."""

    def open_page(anchor="", **settings):
        settings = {"reduced_motion": "reduce"} | settings  # otherwise it plays by itself
        page = window(f"{address}docs/playground.html{anchor}", site=address, **settings)
        page.set_default_timeout(60_000)
        page.locator("#pg-app:visible, #pg-fleet:visible").first.wait_for()
        return page

    return open_page


@pytest.mark.slow
def test_every_plan_in_the_browser_is_the_engines_own(playground_page):
    page = playground_page()
    for name, settings in playground.PRESETS.items():
        assert page.evaluate("settings => playgroundPlans(settings)", settings) == plans_of_an_engine(settings), name


def marked_examples(page):
    return page.get_by_role("button", pressed=True).all_inner_texts()


@pytest.mark.slow
def test_a_visitor_steps_through_an_example_and_sees_queue_rows_blocks_and_counts(playground_page):
    page = playground_page("#too_little_memory", viewport=PHONE)
    states = playground.Playground(playground.PRESETS["Too little memory: preemption (lesson 7)"])
    assert marked_examples(page) == ["Too little memory: preemption (lesson 7)"]
    for _ in range(30):
        page.get_by_role("button", name="Step").click()
        state = states.step()
    assert page.locator("#pg-panel-queue").inner_text().split() == [str(request) for request in state["waiting"]]
    assert page.locator("#pg-panel-blocks .used").count() == sum(isinstance(users, list) for users in state["blocks"])
    assert page.locator(".pg-column").count() == 30
    assert f"{state['counts']['preemptions']}" in page.get_by_role("row", name="preemptions").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_label("token budget per iteration").fill("8")  # a change starts again
    assert page.locator(".pg-column").count() == 0 and marked_examples(page) == []


def as_shown(result):
    """Return a run's result with times to compare: another processor may round the last digit differently."""
    if isinstance(result, dict):
        return {name: as_shown(value) for name, value in result.items()}
    if isinstance(result, list):
        return [as_shown(value) for value in result]
    return float(f"{result:.9g}") if isinstance(result, float) else result


@pytest.mark.slow
def test_every_number_of_a_fleet_in_the_browser_is_the_simulators_own(playground_page):
    page = playground_page()
    for name, settings in playground_fleet.PRESETS.items():
        for size in (1, 3):
            in_browser = page.evaluate("([settings, size]) => playgroundFleet(settings, size)", [settings, size])
            assert as_shown(in_browser) == as_shown(playground_fleet.run(settings, size)), (name, size)


@pytest.mark.slow
def test_a_visitor_sizes_a_fleet_by_keyboard_on_a_phone(playground_page):
    page = playground_page(viewport=PHONE)
    page.add_style_tag(content=":root { color-scheme: light dark } body { background: Canvas }")

    page.get_by_label("One engine").focus()
    page.keyboard.press("ArrowRight")
    status = page.get_by_role("status")
    status.get_by_text("the smallest of these fleets has 3 replicas").wait_for()
    page.get_by_label(re.compile("^replicas")).focus()
    for _ in range(2):
        page.keyboard.press("ArrowLeft")
    status.get_by_text("2 replicas are too few").wait_for()

    lines = page.get_by_role("region", name="Fleets by size").get_by_role("row").all_inner_texts()[1:]
    assert [line.split()[0] for line in lines] == ["1", "2"]
    settings = page.evaluate("playgroundFleetSettings()")
    assert settings == playground_fleet.DEFAULTS | {"replicas": 2}
    shown = playground_fleet.run(settings, 2)
    within = math.floor(1000 * shown["within"]) / 10  # the page never rounds a share up
    assert f"{within}%" in lines[1] and f"{shown['goodput']:.1f}" in lines[1]
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert Axe().run(page, "#pg-root").response["violations"] == []
