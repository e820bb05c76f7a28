"""The page of a sweep that runs: who gets it, what it says of the sweep, and
that nothing but its buttons writes.
"""

import contextlib
import http.client
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.report_records import SCRIPT, config, done, failed
from trainers.config.yaml import dump_yaml
from trainers.errors import ConfigError
from trainers.lease import LEASE, Holder
from trainers.storage import Storage
from tune.trials.journal import Journal, Live, Running, write_live
from tune.trials.record import trial_id
from tune.trials.steering import Actions
from tune.watch import LOOPBACK, Follow, PageServer, Seen, judge


class Sweep:
    """What a driver writes."""

    def __init__(self, directory):
        self.storage = Storage(directory)
        self.journal = Journal(self.storage)

    def begin(self, **changes):
        saved = config(**changes).model_dump(mode="json", exclude_none=True)
        self.storage.write("sweep.yaml", dump_yaml(saved).encode())
        self.beat()

    def beat(self, **changes):
        self.storage.write(
            LEASE, replace(Holder.this_process(), **changes).write()
        )

    def run(self, *running, total=11):
        write_live(self.storage, Live("running", total, 2, list(running)))

    def files(self):
        directory = Path(self.storage.path)
        return {
            str(file): file.read_bytes()
            for file in directory.rglob("*")
            if file.is_file()
        }


@pytest.fixture
def sweep(tmp_path):
    return Sweep(tmp_path / "digits-sweep")


class Looks(Follow):
    """Pages of a directory, two seconds apart, however long they take to draw."""

    def __init__(self, sweep):
        self.now_s = 0.0
        super().__init__(sweep.storage.uri, lambda: self.now_s)

    def page(self):
        self.now_s += 2.0
        return super().page()


@contextlib.contextmanager
def served(sweep):
    with PageServer(Looks(sweep)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path="/", host=None, words=None, **headers):
    connection = http.client.HTTPConnection(LOOPBACK, server.server_port)
    shown = {"Host": host or f"{LOOPBACK}:{server.server_port}"} | {
        k.replace("_", "-"): v for k, v in headers.items()
    }
    body = b"" if words is None else json.dumps(words).encode()
    if body:
        shown["Content-Length"] = str(len(body))
    connection.putrequest("POST" if body else "GET", path, skip_host=True)
    for name, value in shown.items():
        connection.putheader(name, value)
    connection.endheaders(body)
    answer = connection.getresponse()
    answer.text = answer.read().decode()
    connection.close()
    return answer


def test_only_who_has_the_token_gets_the_page(sweep):
    sweep.begin()
    with served(sweep) as server:
        assert server.server_address[0] == "127.0.0.1"
        bearer = {"Authorization": f"Bearer {server.follow.token}"}
        for given in (
            {},
            {"Authorization": "Bearer no"},
            {"Cookie": f"paceline-watch-{server.server_port}=no"},
        ):
            for path in (
                "/",
                "/watch.js",
                "/?token=no",
                "/?token=",
                "/nothing",
            ):
                answer = ask(server, path, **given)
                assert (answer.status, "digits" in answer.text) == (
                    401,
                    False,
                ), path
        first = ask(server, f"/?token={server.follow.token}")
        cookie = first.headers["Set-Cookie"]
        assert (first.status, first.headers["Location"]) == (303, "/")
        assert cookie.endswith("; Path=/; HttpOnly; SameSite=Lax")
        page = ask(server, Cookie=f"other=1; {cookie.partition(';')[0]}")
        assert page.status == 200
        assert "Paceline sweep digits-sweep" in page.text
        assert "script-src 'self'" in page.headers["Content-Security-Policy"]
        assert ask(server, **bearer).status == 200
        assert (
            ask(server, If_None_Match=page.headers["ETag"], **bearer).status
            == 304
        )


def test_names_of_elsewhere_are_refused(sweep):
    """A page whose name resolves to the loopback would be of the same origin,
    and have the cookie.
    """
    sweep.begin()
    with served(sweep) as server:
        bearer = {"Authorization": f"Bearer {server.follow.token}"}
        for host in (
            "evil.example",
            f"evil.example:{server.server_port}",
            "127.0.0.1.evil.example:80",
            "",
        ):
            path = f"/?token={server.follow.token}"
            assert ask(server, path, host or " ", **bearer).status == 403, host
        for host in (
            "localhost:9000",
            "127.0.0.1:9000",
            "localhost",
            f"[::1]:{server.server_port}",
        ):
            assert ask(server, host=host, **bearer).status == 200, host


def test_no_path_is_a_file(sweep):
    sweep.begin()
    with served(sweep) as server:
        bearer = {"Authorization": f"Bearer {server.follow.token}"}
        paths = [
            "/sweep.yaml",
            "/lease.json",
            "/../digits-sweep/sweep.yaml",
            "/%2e%2e/x",
            "//etc/passwd",
            "/style.css",
        ]
        for path in [
            *paths,
            "/watch.js/../../__main__.py",
            "/..%2f..%2fetc/passwd",
        ]:
            assert ask(server, path, **bearer).status == 404, path
        assert "fetch(" in ask(server, "/watch.js", **bearer).text


def test_a_port_in_use_is_an_error(sweep):
    with (
        served(sweep) as server,
        pytest.raises(
            ConfigError,
            match=f"--port={server.server_port}. cannot be",
        ),
    ):
        PageServer(server.follow, server.server_port)


def test_the_page_follows_the_journal_and_writes_nothing(sweep):
    looks = Looks(sweep)
    page, version = looks.page()
    assert "holds no sweep yet" in page
    assert not Path(sweep.storage.path).exists()
    sweep.begin()
    records, (late, *_) = done()[:3], failed()[1:]
    for record in records:
        sweep.journal.append(record)
    trial = {"global_batch_size": 64, "precision": "fp16"}
    sweep.run(Running("abc", 1, 0.0, trial, {"step": 120.0, "val_loss": 0.25}))
    before = sweep.files()
    page, first = looks.page()
    assert first != version
    assert "Running: 3 of 11 trials ended. 2 lanes up." in page
    assert "<td>global_batch_size 64  precision fp16</td>" in page
    assert "val_loss 0.25" in page
    assert page.count('<tr class="') == 3
    assert "python -m trainers" not in page, (
        "best.yaml is not there before the end"
    )
    assert sweep.files() == before
    sweep.journal.append(late)
    page, second = looks.page()
    assert second != first
    assert f'id="trial-{late.id}"' in page
    assert SCRIPT not in page
    write_live(sweep.storage, Live("ended"))
    sweep.storage.delete(LEASE)
    assert "The sweep has ended, with 4 trials." in looks.page()[0]


def test_buttons_steer_as_the_command_does(sweep):
    trial = {"global_batch_size": 64, "precision": "fp32"}
    name = trial_id(trial)
    sweep.begin(budget={"trials": 20})
    with served(sweep) as server:
        bearer = {"Authorization": f"Bearer {server.follow.token}"}
        text = ask(server, **bearer).text
        assert f'data-token="{server.follow.token}"' in text
        assert f'value="{name}"' in text
        for words, said in (
            (["pause"], "pause"),
            (["first", name[:6]], f"first {name}"),
            (["stop", name], f"stop {name}"),
            (["go-on"], "go-on"),
        ):
            answer = ask(server, "/steer", words=words, **bearer)
            assert (answer.status, answer.text.strip()) == (200, said)
            assert f'<p class="muted">{said}</p>' in ask(server, **bearer).text
        found = Actions(sweep.storage).read()
        assert (found.paused, found.first, found.stopped) == (
            False,
            (name,),
            {name},
        )
        for words in (
            ["halt"],
            ["stop"],
            ["stop", "none"],
            ["stop", name, "a=1"],
        ):
            answer = ask(server, "/steer", words=words, **bearer)
            assert answer.status == 400
            assert "`" in ask(server, **bearer).text


def test_nobody_else_steers(sweep):
    """A page of elsewhere, even of another port here, can send a browser's
    cookies, but send no header without being asked first.
    """
    sweep.begin()
    before = sweep.files()
    with served(sweep) as server:
        cookie = ask(server, f"/?token={server.follow.token}").headers[
            "Set-Cookie"
        ]
        good = {"Authorization": f"Bearer {server.follow.token}"}
        for path, status, given in (
            ("/steer", 401, {}),
            ("/steer", 401, {"Cookie": cookie.partition(";")[0]}),
            ("/steer", 401, {"Authorization": "Bearer no"}),
            ("/steer", 403, {**good, "host": "evil.example"}),
            ("/steer", 403, {**good, "Origin": "http://localhost:3000"}),
            ("/steer", 403, {**good, "Origin": "null"}),
            ("/", 404, good),
        ):
            answer = ask(server, path, words=["pause"], **given)
            assert answer.status == status, (path, given)
        for words in ("pause", [], {"pause": 1}, ["pause", 1], ["x" * 5000]):
            assert ask(server, "/steer", words=words, **good).status == 400
        assert ask(server, Origin="http://evil.example", **good).status == 403
    assert sweep.files() == before


HERE = Holder.this_process()
ELSEWHERE = replace(HERE, machine="another")
AGAIN = [
    *done(),
    *(replace(one, purpose="repeat", seed=1) for one in done()[:2]),
]
RUNS = Live("running", 8, 2, [])
ENDS = Live("ended")
STOPS = Live("cut off")


@pytest.mark.parametrize(
    ("seen", "kind", "words"),
    [
        ({"has_sweep": False}, "waiting", "holds no sweep yet"),
        (
            {"holder": HERE, "live": RUNS},
            "running",
            "Running: 8 of 8 trials ended. 2 lanes up.",
        ),
        (
            {"holder": HERE, "records": []},
            "running",
            "Starting: no lane is up yet.",
        ),
        (
            {"holder": HERE, "records": AGAIN, "live": RUNS},
            "running",
            "8 of 8 trials ended, and 2 repeats of the",
        ),
        (
            {"live": ENDS, "records": AGAIN},
            "ended",
            "has ended, with 8 trials and 2 repeats.",
        ),
        (
            {"holder": ELSEWHERE, "holder_idle_s": 29.0, "live": RUNS},
            "running",
            "Running",
        ),
        (
            {"holder": ELSEWHERE, "holder_idle_s": 31.0, "live": RUNS},
            "cut",
            "`python -m tune here` continues",
        ),
        (
            {"holder": replace(HERE, pid=2**22 + 1), "live": RUNS},
            "cut",
            "the sweep's process has ended without an answer",
        ),
        ({"live": STOPS}, "cut", "stopped before its end; kept: 8 trials"),
    ],
)
def test_how_a_sweep_is(seen, kind, words):
    found, sentence = judge(
        Seen(**{"uri": "here", "has_sweep": True, "records": done(), **seen})
    )
    assert found == kind
    assert words in sentence
