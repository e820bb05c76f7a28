"""The rooms: no circle, imports go down, Ray in its folders only; and the
checks themselves find what they are for.
"""

import re
from graphlib import TopologicalSorter

from tests.rooms import (
    FLOORS,
    MOST_WITH_INTERNALS,
    PACKAGES,
    REPOSITORY,
    WITH_RAY,
    file_arrows,
    imported_modules,
    mermaid,
    misnamed,
    ray_elsewhere,
    ray_internals_in,
    room_arrows,
    source_files,
    upward,
)

FILES = file_arrows()


def test_no_rooms_and_no_files_import_each_other():
    for arrows in (room_arrows(FILES), FILES):
        TopologicalSorter(arrows).prepare()  # it names a circle


def test_every_import_goes_down_and_every_file_lies_in_a_room():
    assert upward(FILES) == []


def test_a_file_that_no_other_folder_imports_begins_with_an_underscore():
    assert misnamed(FILES) == []
    door = {"tune.room.door": {"tune.room.inside"}, "tune.room.inside": set()}
    assert len(misnamed(door)) == 1
    assert (
        len(
            misnamed(
                {"tune.x.y": {"tune.room._open"}, "tune.room._open": set()}
            )
        )
        == 1
    )


def test_ray_is_imported_in_its_folders_only():
    assert ray_elsewhere() == []
    places = [
        place
        for place in WITH_RAY
        if not any(_has_ray(path, place) for path in source_files())
    ]
    assert places == [], "a place without Ray needs no permission"


def _has_ray(path, place):
    return str(path.relative_to(REPOSITORY)).startswith(place) and any(
        name.split(".")[0] == "ray" for name in imported_modules(path)
    )


def test_what_ray_does_not_promise_is_used_in_two_files_at_most(tmp_path):
    found = {
        str(path.relative_to(REPOSITORY)): ray_internals_in(path)
        for path in source_files()
    }
    assert (
        len([name for name, uses in found.items() if uses])
        <= MOST_WITH_INTERNALS
    ), found
    probe = tmp_path / "probe.py"
    for line in (
        "from ray.train.v2._internal.util import time_monotonic",
        "from ray.train.v2.api.context import TrainContext",
        "import ray; ray._private.worker.global_worker",
        "def late():\n    from ray._raylet import GcsClient",
        "from ray.experimental import internal_kv",
    ):
        probe.write_text(line)
        assert ray_internals_in(probe), line
    probe.write_text(
        "import ray, ray.train\nfrom ray.util.queue import Empty\nray.get(tray._private)"
    )
    assert not ray_internals_in(probe)


def test_nothing_of_the_product_imports_tests_examples_or_benchmarks():
    for path in source_files():
        assert not {name.split(".")[0] for name in imported_modules(path)} & {
            "tests",
            "examples",
            "benchmarks",
        }, path


def test_the_architecture_page_draws_these_floors_and_names_rooms_and_files_that_are_there():
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    assert mermaid(FILES) in page, "python -m tests.rooms prints the drawing"
    for floor, rooms in FLOORS.items():
        named = ", ".join(room for room in rooms if room != "__main__")
        assert f"| {floor.replace('.', ' ')} | {named} |" in page
    for name in re.findall(r"`([a-z_/]+\.py)`", page):
        assert any(
            (REPOSITORY / place / name).is_file() for place in ("", *PACKAGES)
        ), name
