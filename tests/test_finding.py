"""Every submission is found, whatever it is called and however it is packed; no archive and no table does harm."""

import io
import json
import os
import re
import struct
import zipfile

import pytest
from grading.finding import find_submissions
from grading.roster import Roster
from grading.submissions import MAX_BYTES, GradingError, identify
from handing_in import ONE, ROOT, THREE, TWO, answers_of, notebook


def text_of(assignment, answers=None):
    return json.dumps(notebook(assignment, answers_of(assignment) if answers is None else answers))


RIGHT, UNTOUCHED = text_of(TWO), text_of(TWO, {})
LESSON = (ROOT / "notebooks" / f"{TWO}.ipynb").read_text(encoding="utf-8")


def lay_out(target, files):
    """Write files, {path: text or bytes}, into a folder or, if its name ends so, into a .zip."""
    if target.suffix == ".zip":
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    else:
        for number, (name, content) in enumerate(files.items()):
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
            os.utime(path, (10**9 + number, 10**9 + number))  # each newer than the one before
    return target


def zipped(files):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return data.getvalue()


@pytest.fixture
def find(tmp_path):
    """Lay out files and find: the submissions as {(student, assignment): text}, and {what was ignored: reason}."""

    def run(files, name="submitted", roster="", assignments=()):
        if roster:
            (tmp_path / "roster.csv").write_text(roster, encoding="utf-8")
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        given = Roster(tmp_path / "roster.csv") if roster else None
        found, ignored = find_submissions(lay_out(tmp_path / name, files), scratch, given, assignments)
        texts = {(each.student, each.assignment): each.path.read_text(encoding="utf-8") for each in found}
        return texts, {each.what: each.reason for each in ignored}

    return run


COURSE = {  # a student's checkout: lessons, what was handed out, and a copy with answers
    f"notebooks/{TWO}.ipynb": LESSON,
    f"notebooks/exercises/release/{TWO}/{TWO}.ipynb": UNTOUCHED,
    f"notebooks/exercises/release/{THREE}/{THREE}.ipynb": text_of(THREE, {}),
    f"lab/exercises/release/{TWO}/{TWO}.ipynb": RIGHT,
    f"lab/exercises/release/{TWO}/.ipynb_checkpoints/{TWO}-checkpoint.ipynb": UNTOUCHED,
    ".git/config": "",
}


@pytest.mark.parametrize(
    "files, students",
    [
        ({f"Ada/{TWO}/{TWO}.ipynb": RIGHT, f"Bob [x]/{TWO}.ipynb": RIGHT}, {"Ada", "Bob [x]"}),
        ({f"cleo_{TWO} (1).ipynb": RIGHT, f"eve_{TWO}-2.ipynb": RIGHT}, {"cleo", "eve"}),
        ({"ada/exercise2.ipynb": RIGHT, "bob/2_Static_Batching.IPYNB": RIGHT}, {"ada", "bob"}),
        ({"ada.ipynb": RIGHT, "bob.ipynb.txt": RIGHT, f"{TWO}.ipynb": RIGHT}, {"ada", "bob", "submitted"}),
        ({"ada/hw/deep/x.ipynb": RIGHT, "bob/all.zip": zipped({"hw/x.ipynb": RIGHT})}, {"ada", "bob"}),
        (
            {f"hw2-{name}/{path}": text for name in ("ada", "bob") for path, text in COURSE.items()},
            {"hw2-ada", "hw2-bob"},
        ),
        (
            {
                "Ada Ö_12345_assignsubmission_file_/a b.ipynb": RIGHT,
                "Bob_6_assignsubmission_file_/x.zip": zipped({f"{TWO}.ipynb": RIGHT}),
                "Bob_7_assignsubmission_file_x.ipynb": RIGHT,
            },
            {"Ada Ö", "Bob (6)", "Bob (7)"},
        ),
        (
            {f"lovelaceada_LATE_123_456_{TWO}-1.ipynb": RIGHT, "kbob_124_457_x.zip": zipped({"y/z.ipynb": RIGHT})},
            {"lovelaceada", "kbob"},
        ),
    ],
    ids=["folders", "names", "other_names", "flat", "deep", "github", "moodle", "canvas"],
)
@pytest.mark.parametrize("name", ["submitted", "submitted.zip"])
def test_every_submission_is_found_in_every_layout(find, files, students, name):
    found, _ = find(files, name, assignments=[TWO])
    assert found == {(student, TWO): RIGHT for student in students}


def test_the_file_with_the_exercise_s_cells_and_with_answers_counts_and_the_others_are_listed(find):
    files = {"ada/a.ipynb": "{}", "ada/old.ipynb": UNTOUCHED, "ada/mine.ipynb": RIGHT, "ada/new.ipynb": UNTOUCHED}
    files |= {"di/hw.ipynb": UNTOUCHED, f"di/{TWO}.ipynb": LESSON}
    better = "is not graded for ada, but ada/mine.ipynb is"
    found, ignored = find(files | {f"ada/{TWO}.ipynb": LESSON, "bob/essay.pdf": "", f"cy/{TWO}.ipynb": "no notebook"})
    assert found == {("ada", TWO): RIGHT, ("cy", TWO): "no notebook", ("di", TWO): UNTOUCHED}, (
        "what has an exercise's name gets a line"
    )
    assert ignored == {
        "ada/a.ipynb": "cannot be read as a notebook (KeyError)",
        "ada/old.ipynb": f"{better}: this one is as it was handed out",
        "ada/new.ipynb": f"{better}: this one is as it was handed out",
        f"ada/{TWO}.ipynb": f"{better}: only that one has the exercise's check cells",
        f"di/{TWO}.ipynb": "is not graded for di, but di/hw.ipynb is: only that one has the exercise's check cells",
        "bob": "handed in no notebook that counts",
    }


ROSTER = """\ufeffidentifier;name;github_username;section
am12;Ada Müller;ada-l;Monday
b;Bob;bobby;Monday
am1;Ann;annie;Monday
zz99;Zoe;zoe;Monday
"""


def test_a_roster_says_whose_file_it_is_and_who_handed_in_nothing(find):
    files = {
        f"Monday/Müller, Ada/{TWO}.ipynb": RIGHT,
        f"hw2-bobby/{ONE}.ipynb": text_of(ONE),
        f"b/{TWO}.ipynb": RIGHT,
        f"{TWO} am1.ipynb": RIGHT,
        f"stranger/{TWO}.ipynb": RIGHT,
        f"annie and bobby/{THREE}.ipynb": text_of(THREE),
    }
    found, ignored = find(files, roster=ROSTER)
    assert set(found) == {("am12", TWO), ("b", ONE), ("b", TWO), ("am1", TWO)}
    assert ignored.pop("zz99") == "handed in no notebook that counts"
    assert list(ignored) == [f"annie and bobby/{THREE}.ipynb", f"stranger/{TWO}.ipynb"]
    assert set(ignored.values()) == {"names no student of the roster, or several"}


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "is empty"),
        ("id\n", "names no student"),
        ("id,name\nada,A\nada,B\n", "id of its own"),
        ("id\n" + "".join(f"s{n}\n" for n in range(5001)), "more than 5,000 lines"),
        ("id" + ",x" * 60 + "\nada\n", "50 columns"),
        (b"id\n\xff\xfe\n", "UTF-8"),
        ('id\n"' + "a" * 200_000 + '"\n', "cannot be read as a table"),
        ("id\n" + "a" * 9 * 2**20, "larger than 8 MB"),
    ],
    ids=["empty", "no student", "twice", "lines", "columns", "bytes", "field", "size"],
)
def test_what_is_no_roster_is_refused(tmp_path, text, message):
    path = tmp_path / "roster.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        Roster(path)


# --- hostile archives and files ---------------------------------------------------------------------------------------


def lying(files):
    """An archive that says its files are small."""
    data = bytearray(zipped(files))
    for name in files:
        at = data.rfind(name.encode())
        data[at - 46 + 24 : at - 46 + 28] = struct.pack("<I", 10)
    return bytes(data)


def deep(levels):
    data = RIGHT.encode()
    name = "x.ipynb"
    for _ in range(levels):
        data, name = zipped({name: data}), "x.zip"
    return data


HUGE = "0" * (MAX_BYTES + 1)
BOMBS = {
    "large": (zipped({"x.ipynb": HUGE}), "is larger than 20 MB"),
    "lying": (lying({"x.ipynb": HUGE}), "cannot be unpacked|is larger than 20 MB|cannot be read"),
    "many_bytes": (zipped({f"{n}.ipynb": HUGE[:-1] for n in range(11)}), "unpacks to more than 200 MB"),
    "many_files": (zipped({f"{n}.ipynb": "" for n in range(20_001)}), "lists more than 20,000 files"),
    "long_list": (zipped({f"{n:0>9000}": "" for n in range(1000)}), "lists more than 20,000 files"),
    "deep": (deep(4), "is more than 3 archives deep"),
    "broken": (zipped({"x.ipynb": RIGHT})[:-30], "cannot be unpacked"),
    "no_archive": (b"PK\x05\x06", "cannot be unpacked"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_hostile_archive_is_ignored_with_the_reason_and_costs_no_one_else(find, bomb):
    data, reason = BOMBS[bomb]
    found, ignored = find({"eve/bomb.zip": data, "ada/x.ipynb": RIGHT})
    assert found == {("ada", TWO): RIGHT}
    assert any(re.search(reason, text) for text in ignored.values()), ignored
    assert ignored["eve"] == "handed in no notebook that counts"


def test_no_name_in_an_archive_leads_out_of_the_scratch_folder(find, tmp_path):
    names = [
        "../../evil.ipynb",
        "/etc/evil.ipynb",
        "..\\..\\evil.ipynb",
        "ada/../../evil.ipynb",
        "a" * 300 + "/x.ipynb",
    ]
    found, _ = find(dict.fromkeys(names, RIGHT), "submitted.zip")
    assert {student for student, _ in found} <= {"evil", "etc", "ada", "a" * 100}
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != tmp_path / "scratch"]
    assert outside == [tmp_path / "submitted.zip"] and not (tmp_path.parent / "evil.ipynb").exists()


def test_links_lead_nowhere(find, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    lay_out(elsewhere, {"x.ipynb": RIGHT})
    (tmp_path / "submitted" / "bob").mkdir(parents=True)
    (tmp_path / "submitted" / "dan.ipynb").symlink_to(elsewhere / "x.ipynb")
    (tmp_path / "submitted" / "bob" / "all").symlink_to(elsewhere)
    link = zipfile.ZipInfo("x.ipynb")
    link.external_attr = 0o120777 << 16
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(link, str(elsewhere / "x.ipynb"))
    found, ignored = find({"ada/x.ipynb": RIGHT, "eve/link.zip": data.getvalue()})
    assert set(found) == {("ada", TWO)}
    assert ignored["dan.ipynb"] == "is a link out of the folder"
    assert ignored["eve/link.zip/x.ipynb"].startswith("cannot be read as a notebook")


@pytest.mark.parametrize("text", ["[" * 10**6, '{"cells": [{}]}', '{"cells": [7]}', '{"cells": 7}', "\ud800"])
def test_no_text_of_a_notebook_does_harm(tmp_path, text):
    path = tmp_path / "x.ipynb"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(GradingError, match="cannot be read"):
        identify(path)


def test_a_notebook_with_many_cells_and_outputs_is_read_at_once(tmp_path):
    """Jupyter's own reader took a minute for 10 MB of outputs."""
    nb = json.loads(RIGHT)
    code = next(cell for cell in nb["cells"] if cell["cell_type"] == "code")
    code["outputs"] = [{"output_type": "stream", "name": "stdout", "text": [""]}] * 100_000
    path = tmp_path / "x.ipynb"
    path.write_text(json.dumps(nb))
    assert identify(path) == (TWO, True)
    nb["cells"] += [code | {"outputs": []}] * 2000
    path.write_text(json.dumps(nb))
    with pytest.raises(GradingError, match="more than 2,000 cells"):
        identify(path)
