"""Serve sweeps to an agent by the Model Context Protocol: `python -m tune mcp`.

Each sweep runs in a process of its own (`python -m tune`), because only the
protocol may use standard output. Sweeps outlive the server, and end when their
budgets are used up.
"""

import inspect
import json
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from subprocess import DEVNULL, Popen
from tempfile import TemporaryFile
from typing import IO, Annotated, Any

import anyio
import mcp_types as types
from mcp.server import Server
from mcp.server.stdio import stdio_server
from pydantic import Field

from cluster.files.ray_up import load_cluster
from trainers.command_line import Command
from trainers.config.model import Tree, build
from trainers.config.yaml import dump_inline
from trainers.errors import (
    MISSING,
    ConfigError,
    PacelineError,
    counted,
    first_line,
)
from trainers.lease import LEASE
from trainers.output import as_data
from trainers.storage import Storage, storage_uri
from tune.report.answer import answer
from tune.report.write import read_environment, summary
from tune.sweeps.plan import make_plan
from tune.sweeps.spec import (
    SweepSpec,
    is_complete,
    read_kept,
    read_saved,
    read_sweep,
)
from tune.sweeps.steer import (
    known_trials,
    named_trial,
    order_extension,
    steer,
)
from tune.sweeps.sweep import pending_extension
from tune.trials.journal import Journal
from tune.trials.record import ADVICE, Records
from tune.watch import Follow, judge

Result = Tree

_INSTRUCTIONS = """Paceline finds the batch size and the precision with which a PyTorch
model trains best. Call `validate` and `plan`, then `start`, then `watch` until the sweep
has ended, then `answer`. Report the answer with its interval and what is not known."""
_ONE_RUN = "how much another run of the best trial would differ: finalists or seeds settle it"
_TO_COME = "the results of trials that have not ended"
_NO_LEASE = "The sweep's process is running: the sweep starts or ends now."

_LOOK_S = 0.1

_Sweep = Annotated[str, Field(description="a sweep's file or URI")]
_Cluster = Annotated[str, Field(description="a cluster's file")]
_Directory = Annotated[str, Field(description="a sweep's directory or URI")]
_Keys = Annotated[Tree, Field(description="dotted keys to set")]
_Trial = Annotated[str, Field(description="a trial's id, or its beginning")]
_Minutes = Annotated[
    float | None,
    Field(
        gt=0,
        le=1e9,
        description="minutes that a trial takes; needed if no trial has ended",
    ),
]
_NO_KEYS: Tree = {}


@dataclass(frozen=True)
class Limits:
    """What all sweeps that a server starts may spend together."""

    trials: int
    usd: float
    usd_per_hour: float
    """Price of all that a sweep holds, whatever its file says."""


class Tools:
    """The tools of a server, which may start sweeps only if `limits` are given."""

    def __init__(self, limits: Limits | None) -> None:
        self._limits = limits
        self._trials: dict[str, int] = {}
        """Trials granted so far, by place; `_usd` is the sum of all granted dollars."""
        self._usd = 0.0
        self._follows: dict[str, Follow] = {}
        self._processes: dict[str, tuple[Popen[bytes], IO[bytes]]] = {}
        """The process of each sweep, with its output, by the sweep's place."""

    def validate(self, sweep: _Sweep, settings: _Keys = _NO_KEYS) -> Result:
        """Check a sweep's file and count its trials; start nothing."""
        spec = read_sweep(sweep, settings, own_workers=False)
        least = "at least " if spec.config.around else ""
        return {
            "said": f"{sweep} is in order: {least}{counted(spec.num_trials, 'trial')}",
            "trials": spec.num_trials,
            "directory": spec.uri,
            "sweep": spec.config.model_dump(
                exclude={"train"}, exclude_none=True
            ),
            "not_known": [
                "whether its task can be imported and fits into memory"
            ],
        }

    def plan(
        self,
        sweep: _Sweep,
        cluster: _Cluster,
        settings: _Keys = _NO_KEYS,
        minutes_per_trial: _Minutes = None,
    ) -> Result:
        """Forecast trials, hours and dollars on a cluster; start nothing."""
        spec = read_sweep(sweep, settings, own_workers=False)
        forecast = make_plan(spec, load_cluster(cluster), minutes_per_trial)
        expected = {
            key: getattr(forecast, key) for key in ("trials", "time_s", "usd")
        }
        most = spec.config.budget.model_dump()
        most["time_s"] = spec.config.time_budget_s
        return {
            "said": "\n".join(forecast.lines),
            "expected": expected,
            "at_most": most,
            "not_known": [
                name for name, value in expected.items() if value is None
            ],
        }

    def start(self, sweep: _Sweep, settings: _Keys = _NO_KEYS) -> Result:
        """Run a sweep, or continue it, within the limits of this server.

        Returns immediately. The sweep needs `budget.usd` and, with `around`,
        `budget.trials`. Granted trials and dollars that the sweep does not use
        are not given back.
        """
        settings = settings | {"usd_per_hour": self._allowed().usd_per_hour}
        spec = read_sweep(sweep, settings)
        wrong = ""
        fix = "call `watch`"
        if self._is_running(spec.uri):
            wrong = "runs already"
        elif pending_extension(spec) is not None:
            wrong = "was extended, and the extension has its own budget"
            fix = f"call `extend` with {spec.uri}"
        if wrong:
            raise ConfigError("sweep", sweep, wrong, fix)
        self._refuse_over_limits(spec)
        return self._run(spec, sweep, settings)

    def extend(
        self, directory: _Directory, settings: _Keys = _NO_KEYS
    ) -> Result:
        """Continue a sweep with more points, trials or epochs; `start`'s limits apply."""
        settings = settings | {"usd_per_hour": self._allowed().usd_per_hour}
        spec = read_saved(directory, settings)
        self._refuse_over_limits(spec)
        order_extension(directory, settings)
        # A process looks for extensions until it gives back the lease.
        while self._is_running(spec.uri) and not spec.storage.exists(LEASE):
            time.sleep(_LOOK_S)
        return self._run(spec, spec.uri, {})

    def watch(self, directory: _Directory) -> Result:
        """Report a sweep's progress: what is running, and what is best so far."""
        place = _place(directory)
        is_running = self._is_running(directory)
        follow = self._follows.setdefault(place, Follow(directory))
        seen = follow.see()
        state, sentence = judge(seen)
        if is_running and state != "running":
            # The process has no lease yet, or has given it back.
            state, sentence = "running", _NO_LEASE
        running = seen.live.running if seen.live and seen.is_alive else []
        found: Result = {
            "said": sentence,
            "state": state,
            "trials": Counter(record.status for record in seen.records),
            "running": list(map(asdict, running)),
            "not_known": [] if state == "ended" else [_TO_COME],
        }
        if seen.records:
            found["so_far"] = _answer(read_kept(directory), seen.records)
        if place in self._processes and not is_running:
            process, output = self._processes[place]
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
            records = [
                line for line in lines if line.startswith('{"record": ')
            ]
            found["process"] = {
                "exit_code": process.returncode,
                "last": records[-1:],
            }
        return found

    def stop(self, directory: _Directory, trial: _Trial = "") -> Result:
        """Stop a trial or, if none is given, the whole sweep; ended trials are kept."""
        self._allowed()
        if trial:
            name = steer(directory, "stop", trial)
            said = f"{name} ends at its next evaluation, or never starts"
            return {
                "said": said,
                "not_known": [f"how good {name} would have been"],
            }
        if not self._is_running(directory):
            rule = "is not a sweep that this server runs"
            fix = "name a trial, or end the sweep where it was started"
            raise ConfigError("directory", directory, rule, fix)
        process, _ = self._processes[_place(directory)]
        process.send_signal(signal.SIGTERM)
        return {
            "said": "the sweep ends within seconds",
            "not_known": [_TO_COME],
        }

    def explain(self, directory: _Directory, trial: _Trial) -> Result:
        """Say how a trial ended, and what to do if it failed."""
        spec = read_kept(directory)
        trials = known_trials(spec)
        name = named_trial(trial, trials, spec.uri)
        record = Journal(spec.storage).find(name)
        if record is None:
            return {
                "said": f"{name} has not ended: it is {trials[name].status}",
                "trial": asdict(trials[name]),
                "advice": "",
                "not_known": [f"how {name} will end"],
            }
        said = f"{record.id} ended as {record.status}"
        if record.message:
            said += f": {record.message}"
        return {
            "said": said,
            "trial": asdict(record),
            "advice": "" if record.finished else ADVICE[record.status],
            "not_known": [
                "whether another run of the trial would end the same way"
            ],
        }

    def answer(self, directory: _Directory) -> Result:
        """Say which configuration is best, by how much, and what is in doubt."""
        spec = read_kept(directory)
        return _answer(spec, Journal(spec.storage).records())

    def _allowed(self) -> Limits:
        if self._limits is None:
            rule = "was not given to this server, so it starts no sweep"
            fix = "ask the user to start the server with --allow-run, --max-trials, --max-usd and --usd-per-hour"
            raise ConfigError("--allow-run", MISSING, rule, fix)
        return self._limits

    def _refuse_over_limits(self, spec: SweepSpec) -> None:
        limits = self._allowed()
        own = self._trials.get(_place(spec.uri), 0)
        others = sum(self._trials.values()) - own
        wanted = {
            "trials": (_most_trials(spec), limits.trials - others),
            "usd": (spec.config.budget.usd, limits.usd - self._usd),
        }
        for key, (value, left) in wanted.items():
            if value is None or value > left:
                rule = (
                    f"must be at most {left:g}, all that this server has left"
                )
                given = getattr(spec.config.budget, key)
                if given is None and value is not None:
                    rule += f", and the sweep has {counted(value, 'trial')}"
                fix = f"set `budget.{key}` in `settings`, or ask the server's user for more"
                shown = MISSING if given is None else given
                raise ConfigError(f"budget.{key}", shown, rule, fix)

    def _is_running(self, directory: str) -> bool:
        place = _place(directory)
        if place not in self._processes:
            return False
        process, _ = self._processes[place]
        return process.poll() is None

    def _run(self, spec: SweepSpec, location: str, keys: Tree) -> Result:
        """Take the sweep's budget from the limits; start the sweep unless it runs."""
        place = _place(spec.uri)
        self._trials[place] = _most_trials(spec) or 0
        self._usd += spec.config.budget.usd or 0.0
        if not self._is_running(spec.uri):
            options = [
                f"--{key}={dump_inline(value)}" for key, value in keys.items()
            ]
            command = [
                sys.executable,
                "-m",
                "tune",
                location,
                *options,
                "--json",
            ]
            output = TemporaryFile()  # noqa: SIM115 (read once the process has ended)
            process = Popen(  # noqa: S603
                command,
                0,
                None,
                DEVNULL,
                output,
                output,
                start_new_session=True,
            )
            self._processes[place] = process, output
        unknown = ["whether it fits the cluster", _TO_COME]
        said = "the sweep runs, and `watch` says how far it is"
        return {"said": said, "directory": spec.uri, "not_known": unknown}


def _place(directory: str) -> str:
    """Return what identifies a sweep's directory, however it is written."""
    storage = Storage(storage_uri(directory))
    return storage.path if storage.is_local else storage.uri


def _most_trials(spec: SweepSpec) -> int | None:
    return spec.config.budget.trials if spec.config.around else spec.num_trials


def _answer(spec: SweepSpec, records: Records) -> Result:
    """Return summary.json's content for records, with the best trial's time interval."""
    found = answer(spec.config, records)
    best = found.best
    unknown = [doubt.text for doubt in found.doubts]
    interval: list[float | None] | None = None
    if found.finals:
        time_s = found.finals[0].time_s
        interval = [time_s.low, time_s.high]
    elif best is not None and best.missed_target_s is not None:
        interval = [best.missed_target_s, best.time_to_target_s]
    elif best is not None:
        unknown.append(_ONE_RUN)
    if not is_complete(spec):
        unknown.append(_TO_COME)
    told = {
        "said": found.text,
        "time_to_target_s": interval,
        "not_known": unknown,
    }
    environment = read_environment(spec.storage)
    return told | summary(spec.config, records, environment, found)


def make_server(limits: Limits | None) -> Server[Any]:
    """Return a server of the tools."""
    tools = Tools(limits)
    names = (
        "validate",
        "plan",
        "start",
        "extend",
        "watch",
        "stop",
        "explain",
        "answer",
    )
    offered: Tree = {name: getattr(tools, name) for name in names}
    models = {
        name: Command(name, tool).model for name, tool in offered.items()
    }
    turn = threading.Lock()

    def tell(name: str, given: Tree) -> types.CallToolResult:
        found = None
        words = f"{name!r} is not a tool of this server; its tools are {', '.join(names)}"
        try:
            if name in offered:
                arguments = dict(build(models[name], given, f"tool {name}"))
                with turn:
                    found = as_data(offered[name](**arguments))
                words = json.dumps(found, indent=1)
        except PacelineError as error:
            words = str(error)
        except (
            Exception
        ) as error:  # from the user's code, such as a task's constructor
            words = f"{type(error).__name__}: {first_line(error)}"
        content = [types.TextContent(type="text", text=words)]
        has_failed = found is None
        return types.CallToolResult(
            content=content, structured_content=found, is_error=has_failed
        )

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        shown = []
        for name, tool in offered.items():
            schema = models[name].model_json_schema()
            words = inspect.getdoc(tool)
            shown.append(
                types.Tool(name=name, description=words, input_schema=schema)
            )
        return types.ListToolsResult(tools=shown)

    async def call_tool(context: Any, params: Any) -> types.CallToolResult:
        given = params.arguments or {}
        return await anyio.to_thread.run_sync(tell, params.name, given)

    return Server(
        "paceline",
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def serve(limits: Limits | None) -> None:
    """Serve on standard input and output until the client leaves."""
    server = make_server(limits)

    async def run() -> None:
        async with stdio_server() as (received, sent):
            await server.run(
                received, sent, server.create_initialization_options()
            )

    anyio.run(run)
