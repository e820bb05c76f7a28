"""Prices: the shipped table, what is read from catalogs over HTTP, wrong answers, and what `plan` says of them."""

from __future__ import annotations

import datetime as dt
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path

import pytest

from cluster.__main__ import main
from cluster.catalog import download
from cluster.catalog.skypilot import parse_catalog
from cluster.files.prices import PRICES, STALE_AFTER_DAYS, Price, all_prices, load_prices, read_table, write_table
from tests.price_table import EXCERPTS, make
from tests.specs import REPOSITORY
from trainers.errors import ConfigError, StorageError

TODAY = dt.datetime.now(dt.UTC).date()
HEADER = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone"
ROW = "g5.xlarge,A10G,1.0,4.0,16.0,,1.006,0.5,us-east-1,use1-az1"

Reply = Callable[[BaseHTTPRequestHandler], None]


def text(body: str | bytes, code: int = 200, **headers: str) -> Reply:
    data = body if isinstance(body, bytes) else body.encode()

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in ({"Content_Length": str(len(data))} | headers).items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return reply


class Server:
    """A web server of this machine that answers as it is told."""

    def __init__(self) -> None:
        self.replies: dict[str, Reply] = {}
        self.over = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.replies.get(self.path, text("no such file", 404))(self)

            def log_message(self, *args: object) -> None:
                """Be quiet."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,))
        self.thread.start()

    def end(self) -> None:
        self.over.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    yield server
    server.end()


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's table lies; there is none yet."""
    monkeypatch.delenv("PACELINE_PRICES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "paceline" / "prices.csv"


def test_the_shipped_table_is_what_the_excerpts_give_and_every_row_has_a_source_and_a_date(tmp_path: Path) -> None:
    make(tmp_path / "prices.csv")
    assert (tmp_path / "prices.csv").read_text() == PRICES.read_text(), "run `python -m tests.price_table`"
    for price in read_table(PRICES).values():
        assert price.source.startswith("https://raw.githubusercontent.com/skypilot-org/skypilot-catalog/")
        assert len(price.source.split("/")[5]) == 40  # a commit: nobody changes it
        assert dt.date(2026, 11, 1) < price.date <= TODAY
        assert price.usd_per_hour < 100
        assert price.spot_usd_per_hour is None or price.spot_usd_per_hour <= price.usd_per_hour
        assert bool(price.gpus) == bool(price.gpu_model)
    assert len({price.region for price in read_table(PRICES).values()}) == 10


@pytest.mark.parametrize(
    ("key", "usd", "spot", "holds"),
    [
        # The machine and its GPUs: 0.73948 + 2.93391, 0.36975 + 1.4341.
        (("gcp", "a2-highgpu-1g", "us-central1"), 3.67339, 1.80385, (1, "A100-40GB", 12)),
        (("gcp", "a2-highgpu-8g", "us-central1"), 29.38708, 14.4308, (8, "A100-40GB", 96)),
        (("gcp", "g2-standard-8", "us-east4"), 0.85083, 0.34032, (1, "L4", 8)),
        (("gcp", "n2-standard-8", "us-east4"), 0.43751, 0.08778, (0, "", 8)),
        (("aws", "g5.2xlarge", "us-east-1"), 1.212, 0.4992, (1, "A10G", 8)),  # the median of five zones
        (
            ("aws", "g6.xlarge", "us-east-1"),
            0.8048,
            0.4102,
            (1, "L4", 4),
        ),  # of four: the higher of the two in the middle
        (("aws", "p5.4xlarge", "us-east-1"), 6.88, None, (1, "H100", 16)),  # no zone has a spot price
        (("azure", "Standard_NC24ads_A100_v4", "westus3"), 3.673, 0.40403, (1, "A100-80GB", 24)),
    ],
)
def test_prices_by_hand(key: tuple[str, str, str], usd: float, spot: float | None, holds: tuple[int, str, int]) -> None:
    price = read_table(PRICES)[key]
    assert (price.usd_per_hour, price.spot_usd_per_hour) == (usd, spot)
    assert (price.gpus, price.gpu_model, price.vcpus) == holds


def test_what_contradicts_itself_or_has_no_price_is_left_out_and_counted() -> None:
    google = parse_catalog((EXCERPTS / "gcp.csv").read_text(), "gcp", "x")
    assert not any(row.instance_type == "a2-ultragpu-1g" for row in google.rows)  # its GPU: 1.8462, on spot 1.964
    assert google.left_out["that cost more on spot than on demand"] == 2
    azure = parse_catalog((EXCERPTS / "azure.csv").read_text(), "azure", "x")
    assert {row.gpus for row in azure.rows if "H100" in row.instance_type} == {8}  # it says 12
    others = ["trn1.2xlarge,Trainium,1.0,8.0,32.0,,1.34,0.4,us-east-1,", "t9.nano,,,0.5,1.0,,0.01,,us-east-1,"]
    others += [
        "free,,,4.0,1.0,,0,,us-east-1,",
        "nowhere,,,4.0,1.0,,1,,,",
        "Standard_NV6,A10,0.166,6.0,55,,0.4,,eastus,",
    ]
    found = parse_catalog("\n".join([HEADER, ROW, *others]), "aws", "x")
    assert [row.instance_type for row in found.rows] == ["g5.xlarge"]
    assert sum(found.left_out.values()) == len(others)


def test_update_writes_the_table_that_is_read_first(
    server: Server, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("aws", "gcp", "azure"):
        changed = "Tue, 01 Sep 2026 10:00:00 GMT"
        server.replies[f"/v8/{name}/vms.csv"] = text((EXCERPTS / f"{name}.csv").read_text(), Last_Modified=changed)
    server.replies["/v8/lambda/vms.csv"] = text(f"{HEADER}\ngpu_1x_h100,H100,1.0,26.0,225,,3.29,,us-east-1,")
    assert main(["prices", "update", "--catalog", f"{server.url}/v8"]) == 0
    assert "aws: 53 prices in 4 regions" in capsys.readouterr().out
    price = load_prices("aws", "eu-central-1")["g5.2xlarge"]  # the shipped table does not have that region
    assert (price.usd_per_hour, price.spot_usd_per_hour, price.as_of) == (1.5156, 0.7449, dt.date(2026, 9, 1))
    assert (price.date, price.source) == (TODAY, f"{server.url}/v8/aws/vms.csv")
    before = read_table(table)
    assert main(["prices", "update", "--catalog", f"{server.url}/v8/", "--provider", "lambda"]) == 0
    assert read_table(table).keys() == before.keys() | {("lambda", "gpu_1x_h100", "us-east-1")}  # others' rows stay
    few = ["--region", "us-east-2", "--instance-type", "g5.*xlarge", "--instance-type", "m5.large", "--provider", "aws"]
    assert main(["prices", "update", "--catalog", f"{server.url}/v8", *few]) == 0
    names = {name for provider, name, _ in read_table(table) if provider == "aws"}
    assert names == {"g5.xlarge", "g5.2xlarge", "g5.4xlarge", "g5.12xlarge", "g5.48xlarge", "m5.large"}
    assert ("aws", "p4d.24xlarge", "us-east-1") in all_prices()  # of the shipped table


def test_a_table_elsewhere_is_read_where_the_environment_names_it(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.csv"
    monkeypatch.setenv("PACELINE_PRICES", str(file))
    with pytest.raises(ConfigError, match="must name a price table"):
        load_prices()
    server.replies["/c/aws/vms.csv"] = text(f"{HEADER}\n{ROW.replace('1.006', '0.9')}")
    monkeypatch.delenv("PACELINE_PRICES")
    given = ["prices", "update", "--catalog", f"{server.url}/c", "--provider", "aws", "--to", str(file)]
    assert main(given) == 0
    assert f"PACELINE_PRICES={file}" in capsys.readouterr().out
    monkeypatch.setenv("PACELINE_PRICES", str(file))
    assert load_prices("aws", "us-east-1")["g5.xlarge"].usd_per_hour == 0.9
    file.write_text(file.read_text().replace(",0.9,", ",-0.9,"))
    with pytest.raises(ConfigError, match=r"mine.csv: `row 1, usd_per_hour` is \"-0.9\""):
        load_prices()
    assert main(given) == 2  # it is not replaced unread


def _drip(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b"x" * 100)


@pytest.mark.parametrize(
    ("reply", "code", "words"),
    [
        (text("<html><body>Sign in</body></html>"), 2, "is no catalog: it has no column AcceleratorCount"),
        (text(""), 2, "is no catalog"),
        (text("{}"), 2, "is no catalog"),
        (text(HEADER.replace("SpotPrice", "Spot") + f"\n{ROW}"), 2, "has no column SpotPrice"),
        (text(HEADER), 2, "has no machine with a price (no row)"),
        (text(f"{HEADER}\n{ROW.replace('1.006,0.5', ',')}"), 2, "has no machine with a price (1 without a price)"),
        (text(f"{HEADER}\n{ROW.replace('1.006', '-1.006')}"), 2, '`line 2, Price` is "-1.006", but must be between 0'),
        (text(f"{HEADER}\n{ROW.replace('0.5', 'nan')}"), 2, '`line 2, SpotPrice` is "nan"'),
        (text(f"{HEADER}\n{ROW.replace('1.006', '1e300')}"), 2, '`line 2, Price` is "1e300"'),
        (text(f"{HEADER}\n{ROW.replace('1.006', 'cheap')}"), 2, '`line 2, Price` is "cheap"'),
        (text(f"{HEADER}\n{ROW}\n{ROW[:20]}"), 2, "`line 3` must have 10 cells"),
        (text(f"{HEADER}\n{ROW},more"), 2, "`line 2` must have 10 cells"),
        (text(f'{HEADER}\n"{ROW}'), 2, "is no CSV"),
        (text(f"{HEADER}\n{ROW.replace('g5.', chr(27))}"), 2, "has a character that no name has"),
        (text(b"\x1f\x8b\xff\xfe"), 1, "it is no text in UTF-8"),
        (text("gone", 404), 1, "the server answers 404"),
        (text("slow down", 429), 1, "the server answers 429"),
        (text("oh", 500), 1, "the server answers 500"),
        (text("", 302, Location="/c/aws/vms.csv"), 1, "infinite loop"),
        (text("", 302, Location="file:///etc/passwd"), 1, "302"),
        (text(f"{HEADER}\n{ROW}", Content_Length="5000"), 1, "of 5000 bytes"),
        (text("x" * 5000), 1, "it has more than 0 MB"),
        (lambda handler: handler.connection.close(), 1, "cannot be read"),
    ],
)
def test_a_wrong_answer_is_one_sentence_and_the_old_table_stays(
    reply: Reply,
    code: int,
    words: str,
    server: Server,
    table: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(download, "MOST_BYTES", 4000)
    write_table(table, read_table(PRICES).values())
    before = table.read_text()
    server.replies["/c/aws/vms.csv"] = reply
    assert main(["prices", "update", "--catalog", f"{server.url}/c", "--provider", "aws"]) == code
    error = capsys.readouterr().err
    assert words in error
    assert "the price table stays as it was" in error
    assert error.count("\n") == 1
    assert table.read_text() == before
    assert list(table.parent.iterdir()) == [table]


def test_a_server_that_is_silent_slow_or_gone_is_given_up(
    server: Server, table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["prices", "update", "--provider", "aws", "--catalog", f"{server.url}/c"]
    monkeypatch.setattr(download, "SILENCE_S", 0.1)
    server.replies["/c/aws/vms.csv"] = lambda handler: server.over.wait(30) and None
    assert main(given) == 1
    monkeypatch.setattr(download, "WHOLE_S", -1.0)
    server.replies["/c/aws/vms.csv"] = _drip
    assert main(given) == 1
    assert main([*given[:-1], "ftp://example.org"]) == 1
    server.http.socket.close()
    errors = capsys.readouterr().err.splitlines()
    assert [one.rpartition(": ")[2].removesuffix("; the price table stays as it was") for one in errors] == [
        "timed out",
        "it is not whole after -1 seconds",
        "it is no address of http or https",
    ]
    assert not table.exists()


def test_a_redirect_is_followed_but_never_away_from_https(server: Server) -> None:
    server.replies["/old"] = text("", 302, Location=f"{server.url}/new")
    server.replies["/new"] = text("here")
    assert download.download(f"{server.url}/old").text == "here"
    request = urllib.request.Request("https://example.org/a")
    with pytest.raises(urllib.error.URLError, match="not https"):
        download._Redirects().redirect_request(request, BytesIO(), 302, "", Message(), "http://example.org/a")


def test_a_file_on_github_has_the_day_of_its_last_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    sha, raw = "a" * 40, "https://raw.githubusercontent.com/o/r"
    asked: list[str] = []
    commits = json.dumps([{"sha": sha, "commit": {"committer": {"date": "2026-09-01T23:00:00Z"}}}])
    answers = {"https://api.github.com/repos/o/r/commits?path=c%2Faws%2Fvms.csv&sha=master&per_page=1": commits}

    def answer(url: str) -> tuple[str, None]:
        asked.append(url)
        if url.startswith("https://api") and url not in answers:
            raise StorageError("403 rate limit exceeded")
        return answers.get(url, "text"), None

    monkeypatch.setattr(download, "_text", answer)
    found = download.download(f"{raw}/master/c/aws/vms.csv")
    assert (found.url, found.as_of) == (f"{raw}/{sha}/c/aws/vms.csv", dt.date(2026, 9, 1))
    assert asked[-1] == found.url
    for wrong in ("[]", "{}", "no json", '[{"sha": 1, "commit": {"committer": {"date": "2026-09-01"}}}]'):
        answers = {next(iter(answers)): wrong}
        unknown = download.download(f"{raw}/master/c/aws/vms.csv")
        assert (unknown.url, unknown.as_of) == (f"{raw}/master/c/aws/vms.csv", None)
    assert download.download(f"{raw}/other/c/aws/vms.csv").as_of is None  # the API's limit is used up


def price(**changes: object) -> Price:
    return replace(read_table(PRICES)["aws", "g5.2xlarge", "us-east-1"], **changes)


def test_plan_says_how_old_a_price_is_and_what_it_is_not(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = TODAY - dt.timedelta(days=STALE_AFTER_DAYS + 1)
    assert price(date=TODAY, as_of=None).age(TODAY) == "read 0 days ago from a source of unknown age"
    assert price(as_of=TODAY).age(TODAY) == "0 days old"
    assert not price(as_of=TODAY - dt.timedelta(days=STALE_AFTER_DAYS)).is_stale(TODAY)
    write_table(table, [price(as_of=old)])
    assert main(["plan", str(REPOSITORY / "cluster/aws.yaml"), "--workers", "1"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("price of g5.2xlarge"))
    assert f"{STALE_AFTER_DAYS + 1} days old, STALE: over 180 days, `python -m cluster prices update`" in line
    # Of a region without a price the dearest other is said, and that it is another's.
    found = load_prices("aws", "af-south-1")["p4d.24xlarge"]
    assert found.usd_per_hour == 21.957642


@pytest.mark.parametrize(
    ("name", "on_demand", "spot"),
    [
        ("aws", 0.384 + 8 * 1.212, 0.384 + 8 * 0.4992),
        ("gcp", 0.38847 + 8 * (0.29358 + 0.56004), 0.38847 + 8 * (0.11747 + 0.2231)),
        ("azure", 0.384 + 4 * 3.673, 0.384 + 4 * 0.444433),
    ],
)
def test_plan_of_each_shipped_file_costs_what_a_calculation_by_hand_says(
    name: str, on_demand: float, spot: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(REPOSITORY / f"cluster/{name}.yaml"), "--workers", "1"]) == 0
    grown = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("fully grown"))
    assert grown.split()[-2:] == [f"{on_demand:.2f}", f"{spot:.2f}"]
