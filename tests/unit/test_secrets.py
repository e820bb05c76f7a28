"""No secret is shown or saved, no text moves the cursor, and what is written
is for its owner alone.
"""

import logging
import os
import pickle
import stat

import pytest

from tests.specs import read_spec
from trainers.causes import failure_of
from trainers.errors import (
    ConfigError,
    RunFailedError,
    StorageError,
    first_line,
    last_line,
    redact,
    show,
)
from trainers.launch import local
from trainers.launch.process import setup_logging
from trainers.launch.spec import read_file
from trainers.storage import Storage, storage_uri

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfi"  # noqa: S105
HIDDEN = "***"

NAMED = [
    "s3://AKIAIOSFODNN7:{}@bucket/runs",
    "s3://AKIA:{}@bucket/runs?region=eu-west-1",
    "s3://:{}@bucket",
    "s3://minio:a{}b@c/d@bucket/x",
    "abfss://container:{}@account.dfs.core.windows.net/x",
    "https://user:{}@example.org/a.yaml",
    "redis://:{}@head:6379",
    "s3://bucket/x?access_key=AKIA&secret_key={}&region=x",
    "s3://bucket/x?session_token={}",
    "abfs://c@a.dfs.core.windows.net/x?sv=2024&sig={}",
    "https://bucket.s3.amazonaws.com/x?X-Amz-Security-Token={}&X-Amz-Signature={}",
    "https://example.org/?token={}#there",
    "{{'api_key': '{}', 'rows': 3}}",
    '{{"password": "{} with spaces"}}',
    "api_key: {}",
    "AWS_SECRET_ACCESS_KEY={} python train.py",
    '`task_args.api_key: "{}"` is not a known key',
    "Authorization: Bearer {}",
    "authorization=Basic {}",
]
HARMLESS = [
    "s3://bucket/runs/digits",
    "abfss://container@account.dfs.core.windows.net/x?enable_tls=true",
    "gs://anonymous@bucket/x",
    "hdfs://user@namenode:8020/x",
    "s3://bucket/run@2?scheme=http&endpoint_override=minio:9000",
    "http://127.0.0.1:8265 (it asks for the token that `ray get-auth-token` prints)",
    "tokens: 512, max_token: 7, tokenizer: bert, config: x, keys: [a], secretary: y",
    "`optimizer.lr: 0` must be more than 0; write 0.1",
    "tab\tand\nnewline stay, and so do \u00e9\u4e2d\U0001f600",
]


@pytest.mark.parametrize("text", NAMED)
def test_what_is_named_as_a_secret_is_hidden(text):
    shown = redact(text.format(*[SECRET] * 2))
    assert SECRET not in shown
    assert SECRET[:6] not in shown
    assert SECRET[-6:] not in shown
    assert HIDDEN in shown


@pytest.mark.parametrize("text", HARMLESS)
def test_all_else_stays_what_it_is(text):
    assert redact(text) == text


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "AWS_SESSION_TOKEN",
        "PGPASSWORD",
        "my_secret",
        "AWS_ACCESS_KEY_ID",
    ],
)
def test_a_secret_of_the_environment_is_hidden_wherever_it_stands(
    name, monkeypatch
):
    monkeypatch.setenv(name, SECRET)
    assert (
        redact(f"ValueError: cannot log in as <{SECRET}>")
        == f"ValueError: cannot log in as <{HIDDEN}>"
    )
    monkeypatch.setenv(name, "no")
    assert (
        redact("no short word is taken for one")
        == "no short word is taken for one"
    )


def test_nothing_moves_the_cursor():
    """Escape sequences could rewrite what stands above; a lone surrogate would
    end the program that prints it.
    """
    for code in [
        *range(9),
        *range(11, 32),
        *range(127, 160),
        0x202E,
        0x2066,
        0xD800,
        0xDFFF,
    ]:
        shown = redact(f"a{chr(code)}[2Jb")
        assert chr(code) not in shown
        assert shown.startswith("a\\")
        shown.encode()


URI = f"s3://AKIAIOSFODNN7:{SECRET.replace('/', '%2F')}@bucket/runs"


def test_errors_hide_it_however_they_are_made():
    errors = [
        ConfigError(
            "storage_path",
            URI,
            f"cannot be opened ({URI})",
            "use another",
            URI,
        ),
        ConfigError("api_key", SECRET, "is no such key", "remove it"),
        StorageError(f"could not write {URI}"),
        failure_of(OSError(f"no bucket in {URI}"), 0),
        RunFailedError("error", f"password={SECRET}"),
    ]
    sent = [pickle.loads(pickle.dumps(error)) for error in errors]  # noqa: S301
    for error in (*errors, *sent):
        assert "FEMI" not in str(error)
        assert HIDDEN in str(error)
    assert all(
        "FEMI" not in error.message
        for error in errors
        if isinstance(error, RunFailedError)
    )
    assert "FEMI" not in show(f"{'x' * 130} {URI}") + show(
        {"a": {"secret_key": SECRET}}
    )
    assert "FEMI" not in first_line(OSError(URI)) + last_line(
        OSError(f"a\n{URI}")
    )


def test_the_log_and_tracebacks_hide_it(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    setup_logging(0)
    for name in ("trainers", "cluster", "tune"):
        logging.getLogger(name).info("read %s\x1b[2J", URI)
    with pytest.raises(RunFailedError), local.failing_as_run(0):
        raise ValueError(f"{URI} with {SECRET}")
    shown = "".join(capsys.readouterr())
    assert "FEMI" not in shown
    assert "\x1b" not in shown
    assert "Traceback" in shown
    assert shown.count(HIDDEN) >= 5


@pytest.mark.parametrize("text", NAMED[:12])
def test_storage_takes_no_credentials(text):
    """No run has them in its address, so none can be saved with one, or be
    shown by Ray, pyarrow or the shell.
    """
    uri = text.format(*[SECRET.replace("/", "%2F")] * 2)
    with pytest.raises(ConfigError) as raised:
        Storage(uri)
    assert "FEMI" not in str(raised.value)
    assert "AWS_SECRET_ACCESS_KEY" in str(raised.value)


def test_no_door_takes_credentials(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_STORAGE", URI)
    (tmp_path / "train.yaml").write_text(
        "task: tests.tasks:Blobs\nepochs: 1\nglobal_batch_size: 8\noptimizer: {lr: 1}"
    )
    file = str(tmp_path / "train.yaml")
    doors = [
        lambda: read_spec(file, {}),
        lambda: read_file(URI),
        lambda: Storage(storage_uri(URI)),
    ]
    doors += [lambda: read_spec(file, {"storage_path": URI})]
    for door in doors:
        with pytest.raises(
            ConfigError, match="must hold no key or password"
        ) as raised:
            door()
        assert "FEMI" not in str(raised.value)


@pytest.mark.parametrize(
    "uri",
    ["s3://AKIA:wJalrXUtn/FEMI@bucket/x", "s3://[wJalrXUtnFEMI:x@bucket"],
)
def test_a_password_that_breaks_the_uri_is_not_shown_either(uri):
    with pytest.raises(ConfigError) as raised:
        Storage(uri).exists()
    assert "FEMI" not in str(raised.value)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("asked", "file", "directory"),
    [(None, 0o600, 0o700), ("640", 0o640, 0o750), ("0644", 0o644, 0o755)],
)
def test_what_is_written_is_for_its_owner_unless_the_user_says_otherwise(
    tmp_path, monkeypatch, asked, file, directory
):
    if asked:
        monkeypatch.setenv("PACELINE_FILE_MODE", asked)
    before = os.umask(0o022)
    try:
        storage = Storage(tmp_path / "runs" / "digits")
        storage.write("config.yaml", b"a: 1")
        storage.write("checkpoints/step-1/state.pt", b"")
    finally:
        os.umask(before)
    root = tmp_path / "runs" / "digits"
    assert {mode(path) for path in root.rglob("*") if path.is_file()} == {file}
    inner = root / "checkpoints" / "step-1"
    assert {mode(root), mode(inner)} == {directory}


def test_a_variable_that_another_thread_removes_stops_no_report(monkeypatch):
    class Going(dict):
        def __getitem__(self, name):
            raise KeyError(name)

        def get(self, name, default=None):
            return default

    monkeypatch.setattr(os, "environ", Going({"API_TOKEN": "it was here"}))
    assert redact("it was here") == "it was here"
