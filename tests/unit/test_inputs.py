"""Files and words of strangers: whatever they hold, one sentence and exit code
2, at once and in little memory.
"""

import re

import pytest

import cluster.__main__
import trainers.__main__
import tune.__main__
from tests.specs import BASE
from tests.unit.cluster_files import TYPES, broken, put
from tests.unit.test_fuzz import laughs
from trainers.command_line import entries
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.config.yaml import (
    LONGEST,
    MOST_VALUES,
    dump_yaml,
    parse_documents,
    parse_mapping,
    parse_yaml,
)
from trainers.errors import ConfigError, PacelineError
from trainers.launch.spec import read_file, read_mapping
from trainers.storage import Storage
from tune.config import SweepConfig

DOORS = {
    "trainers": lambda file: trainers.__main__.main([file]),
    "tune": lambda file: tune.__main__.main([file]),
    "cluster": lambda file: cluster.__main__.main(["validate", file]),
}
HOSTILE = {
    "cycle": "&a {x: *a}",
    "cycle_by_an_earlier_document": "--- &a 1\n--- &a [*a]\n",
    "braces": "{a: " * 5000,
    "deep_by_aliases": "".join(f"a{n}: &a{n} {'[' * 40}{f'*a{n - 1}' if n else ''}{']' * 40}\n" for n in range(9)),
    "laughs": laughs(9, 9),
    "merges": "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}], x: 2}}\n" for n in range(1, 40)),
    "values": "a: [" + "1, " * 2 * MOST_VALUES + "]",
    "long": "#" + "x" * LONGEST,
    "digits": "a: " + "9" * 5000,
    "python": "a: !!python/object/apply:os.system [x]",
    "duplicate": "a: {b: 1, b: 2}",
    "list": "- 1",
    "empty": "",
    "undefined_alias": "a: *b",
}  # fmt: skip


def one_sentence(capsys):
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("error: ")
    assert line.isprintable()
    assert len(line) < 1000
    return line


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file(door, text, tmp_path, capsys):
    (tmp_path / "given.yaml").write_text(text)
    assert DOORS[door](str(tmp_path / "given.yaml")) == 2
    assert str(tmp_path / "given.yaml") in one_sentence(capsys)


KINDS = {
    "link_to_itself": lambda path: path.symlink_to(path),
    "directory": lambda path: path.mkdir(),
    "invalid_utf_8": lambda path: path.write_bytes(b"a: \xff"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_of_text(kind, tmp_path, capsys):
    KINDS[kind](tmp_path / "given.yaml")
    for file in (
        str(tmp_path / "given.yaml"),
        f"file://{tmp_path}/given.yaml",
    ):
        for door in DOORS if "://" not in file else ("trainers", "tune"):
            assert DOORS[door](file) in (
                (1, 2) if kind == "link_to_itself" else (2,)
            ), (door, file)
            one_sentence(capsys)
    with pytest.raises(PacelineError):
        read_mapping(Storage(tmp_path), "given.yaml")


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "a\0b",
        "a\0b/c",
        "x" * 300,
        "x" * 5000,
        "/dev/zero/x",
        "\udcff",
        "a\nb",
    ],
)
def test_a_name_that_no_file_can_have(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        read_file(name)
    assert str(raised.value).isprintable()


def test_a_byte_order_mark_and_aliases_are_fine():
    assert parse_mapping("\ufeffa: 1", "f") == {"a": 1}
    assert parse_yaml("a: &a [1, {b: 2}]\nc: [*a, *a]", "f") == {
        "a": [1, {"b": 2}],
        "c": [[1, {"b": 2}]] * 2,
    }
    merging = "a: &a {x: 1, y: 2}\nb: {x: 3, <<: *a}"
    tree = parse_yaml(merging, "f")
    assert tree == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}}
    assert parse_documents(merging, "f") == [tree]
    for text in ({"<<": {"x": 1}}, {"x": "<<", "y": ["<<"]}):
        assert parse_yaml(dump_yaml(text), "f") == text
    with pytest.raises(ConfigError, match="repeats the key `x`"):
        parse_yaml("a: &a {x: 1}\nb: {<<: *a, x: 3, x: 4}", "f")
    merged = "b: &b {x: 1}\ndeep: {deeper: &d {<<: *b, x: 2}}\nc: {<<: *d, x: 3}\ne: {<<: [*d, *b]}"
    assert parse_documents(merged, "f")[0]["c"] == {"x": 3}


# Keys of other tools.


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("accumulate_grad_batches", "`microbatch_size`"),
        (
            "batch_size",
            "`global_batch_size` (Samples of one optimizer step over all workers) or `batch_size_per_worker`",
        ),
        (
            "num_workers",
            "`data.num_workers` (DataLoader processes of each worker) or `scaling.num_workers`",
        ),
        ("fp16", "`precision`"),
        ("sampler", "follows from `seed`"),
        ("Weight-Decay", "`optimizer.weight_decay`"),
        ("zebra", "find the keys with `python -m trainers --help`"),
    ],
)
def test_a_key_of_another_tool(name, here):
    with pytest.raises(ConfigError) as raised:
        build(TrainConfig, BASE | {name: 1}, "f")
    assert here in str(raised.value)
    assert len(str(raised.value)) < 260


@pytest.mark.parametrize("model", [TrainConfig, SweepConfig])
def test_what_other_tools_have_is_a_key_here(model):
    keys = {key for key, _, _ in entries(model)}
    keys |= {
        f"{name}.{key}"
        for name, held in model.holds.items()
        for key, _, _ in entries(held)
    }
    keys |= {key.rpartition(".")[0] for key in keys}
    for name, meant in model.foreign.items():
        assert isinstance(meant, str) or keys.issuperset(meant), name
        assert name not in model.model_fields or model is SweepConfig, name


# Cluster files of any shape.

NODE = f"{TYPES}.gpu_spot"
SHAPES = [
    (
        "aws",
        put("provider.security_group", {"IpPermissions": ["22"]}),
        "provider.security_group.IpPermissions.0",
    ),
    ("aws", put(f"{NODE}.max_workers", 10**9), f"{NODE}.max_workers"),
    ("aws", put("max_workers", 10**12), "max_workers"),
    ("aws", put("head_node", "x"), "head_node"),
    (
        "onprem",
        put("provider.worker_ips", [{"a": 1}]),
        "provider.worker_ips.0",
    ),
]


@pytest.mark.parametrize(
    ("name", "change", "field"),
    SHAPES,
    ids=[f"{case[0]}-{case[2]}" for case in SHAPES],
)
def test_a_cluster_file_of_any_shape(name, change, field, tmp_path, capsys):
    file = broken(name, change, tmp_path)
    assert cluster.__main__.main(["validate", file]) == 2
    named = rf"{re.escape(field)}(: [^`]*)?` "
    assert re.search(named, one_sentence(capsys))
