"""The rooms: no circle, imports go down, Ray in its folders only; and the checks themselves find what they are for."""

from __future__ import annotations

import re
from pathlib import Path

from tests.rooms import (
    ORDER,
    PACKAGES,
    REPOSITORY,
    WITH_RAY,
    circles,
    file_arrows,
    floors,
    imported_modules,
    mermaid,
    ray_elsewhere,
    room_arrows,
    source_files,
    upward,
)

FILES = file_arrows()


def test_no_rooms_and_no_files_import_each_other() -> None:
    assert circles(room_arrows(FILES)) == []
    assert circles(FILES) == []


def test_every_import_goes_down_and_every_file_lies_in_a_room() -> None:
    assert upward(FILES) == []


def test_the_declared_order_is_one_that_the_imports_allow() -> None:
    """Derived from the imports alone: no room stands on a floor above one that imports it."""
    level = floors(room_arrows(FILES))
    for room, targets in room_arrows(FILES).items():
        assert all(level[target] < level[room] for target in targets), room
    assert {room for package in PACKAGES for room in ORDER[package]} >= {room.split(".")[1] for room in level}


def test_ray_is_imported_in_its_folders_only() -> None:
    assert ray_elsewhere() == []
    places = [place for place in WITH_RAY if not any(_has_ray(path, place) for path in source_files())]
    assert places == [], "a place without Ray needs no permission"


def _has_ray(path: Path, place: str) -> bool:
    return str(path.relative_to(REPOSITORY)).startswith(place) and any(
        name.split(".")[0] == "ray" for name in imported_modules(path)
    )


def test_nothing_of_the_product_imports_tests_examples_or_benchmarks() -> None:
    for path in source_files():
        assert not {name.split(".")[0] for name in imported_modules(path)} & {"tests", "examples", "benchmarks"}, path


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": set(), "c": {"a", "b"}}) == []


def test_a_floor_is_one_above_what_is_imported() -> None:
    assert floors({"a": set(), "b": {"a"}, "c": {"a", "b"}, "d": set()}) == {"a": 0, "b": 1, "c": 2, "d": 0}
    assert floors({"a": {"b"}, "b": {"a"}, "c": {"a"}}) == {"a": 0, "b": 0, "c": 1}


def test_an_upward_import_a_strange_room_and_a_wrong_package_are_found() -> None:
    assert upward({"trainers.data.feed": {"trainers.loop.fit"}}) == [
        "trainers.data.feed imports trainers.loop.fit, which lies above it"
    ]
    assert upward({"trainers.task": {"tune.config"}}) == ["trainers.task imports tune.config, which lies above it"]
    assert upward({"trainers.cellar.wine": set()}) == ["trainers.cellar.wine lies in no known room"]
    assert upward({"tune.sweeps.run": {"cluster.spot", "trainers.task"}}) == []


def test_ray_in_a_wrong_room_is_found(tmp_path: Path) -> None:
    (tmp_path / "trainers" / "data").mkdir(parents=True)
    (tmp_path / "trainers" / "data" / "feed.py").write_text("def f() -> None:\n    import ray.train\n")
    (tmp_path / "trainers" / "on_ray").mkdir()
    (tmp_path / "trainers" / "on_ray" / "trainer.py").write_text("import ray\n")
    [found] = ray_elsewhere(tmp_path)
    assert found.startswith("trainers/data/feed.py imports Ray")


def test_lazy_imports_count(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("from b import c\n\ndef f() -> None:\n    import d.e\n")
    assert imported_modules(path) == {"b", "b.c", "d.e"}


def test_the_architecture_page_draws_these_rooms_and_names_files_that_are_there() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    assert mermaid(FILES) in page, "python -m tests.rooms --mermaid prints the drawing"
    for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)?\.py)`", page):
        assert any((REPOSITORY / package / name).is_file() for package in PACKAGES), name
