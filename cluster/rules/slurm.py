"""Read a Slurm batch script as sbatch does, and judge it: what hangs, or is lost.

Nothing in a script is run.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.files.cluster_file import read_file
from cluster.finding import Finding, Level, error, warning
from cluster.rules import common
from trainers.errors import MISSING, ConfigError, did_you_mean

_SHORT = {
    "-N": "nodes",
    "-n": "ntasks",
    "-c": "cpus-per-task",
    "-t": "time",
    "-G": "gpus",
}
_OWN_DISK = re.compile(
    r"(?:/tmp|/var/tmp|/dev/shm|/local|\$\{?(?:TMPDIR|SLURM_TMPDIR|RAY_TMPDIR)\}?)(?:/|$)"
)

_OPTIONS: tuple[tuple[str, str, Level, str, str], ...] = (
    (
        "ntasks-per-node",
        "1",
        "error",
        "must be one task a node: the second on a node finds the first one's Ray, and ends",
        "write 1; Ray starts the workers",
    ),
    (
        "exclusive",
        "",
        "warning",
        "must give whole nodes: symmetric-run refuses one with another Ray, and at its end stops each of yours",
        "write `--exclusive`",
    ),
    (
        "signal",
        r"R?B:\w+@([6-9]\d|\d{3,})",
        "error",
        "must tell this script (`B:`) 60 s or more before its limit, or what came after the last checkpoint is lost",
        "write `--signal=B:USR1@120` and a trap, as in cluster/slurm.sbatch",
    ),
    (
        "requeue",
        "",
        "warning",
        "should be there: whether a job comes back after its time, or when a node dies, is the site's choice",
        "add `#SBATCH --requeue`",
    ),
    (
        "open-mode",
        "append",
        "warning",
        "should be append, or the job that comes back deletes the log of its first try",
        "write append",
    ),
)
"""Options of every script: name, the pattern of a right value, and what is said of
another; of none it is a warning.
"""

_COUNT = r"\d+"
_MEMORY = r"\d+[KMGT]?B?"
_GPUS = r"([\w.-]+:)?\d+(,[\w.-]+:\d+)*"
_FORMS = {
    "nodes": r"(\d+[km]?(-\d+[km]?(:\d+)?)?)(,\d+[km]?(-\d+[km]?(:\d+)?)?)*",
    "ntasks": _COUNT,
    "ntasks-per-node": _COUNT,
    "cpus-per-task": _COUNT,
    "time": r"(\d+-)?\d+(:\d+){0,2}|infinite|unlimited",
    "mem": _MEMORY,
    "mem-per-cpu": _MEMORY,
    "mem-per-gpu": _MEMORY,
    "gpus": _GPUS,
    "gpus-per-node": _GPUS,
    "gpus-per-task": _GPUS,
    "gres": r"\w+(:[\w.-]+){0,2}(,\w+(:[\w.-]+){0,2})*",
}
"""What sbatch takes as the values of some options."""
_KNOWN = """
    account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container
    contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency
    distribution error exclude exclusive export export-file extra extra-node-info get-user-env gid gpu-bind gpu-freq
    gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold ignore-pbs input job-name
    kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network
    nice no-kill no-requeue nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node
    ntasks-per-socket open-mode output overcommit oversubscribe parsable partition power prefer priority profile
    propagate qos quiet reboot requeue reservation resv-ports segment signal sockets-per-node spread-job stepmgr
    switches test-only thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid use-min-nodes
    verbose wait wait-all-nodes wckey wrap
"""
"""The long options of sbatch (Slurm 25.05), which takes the beginning of one, too,
where it is that of one alone.
"""

_SYMMETRIC_RUN: tuple[tuple[str, Level, str, str], ...] = (
    (
        r"--min-nodes[=\s]+[\"']?\$\{?SLURM_(JOB_NUM_NODES|NNODES)",
        "error",
        "must wait for exactly the job's nodes, or the command starts on the head alone, or never",
        'write `--min-nodes "$SLURM_JOB_NUM_NODES"`',
    ),
    (
        r"--address[=\s]+(?![\"']?(?:localhost|127\.|\[?::1))\S",
        "error",
        "must have --address, that of the first node in the network: every node would be a head of its own",
        'take it from `scontrol show hostnames "$SLURM_JOB_NODELIST"`',
    ),
    (
        r"--address[=\s]+(?!\S*:\d+\b)\S",
        "warning",
        "should have a port of this job's own: another job, or a worker of Ray's, may use it",
        "write $((20000 + SLURM_JOB_ID % 10000))",
    ),
)
"""What must be found in the command of `ray symmetric-run`, and what is said where it
is not.
"""


@dataclass(frozen=True)
class Command:
    """A command of the script, with what backslashes join to it."""

    line: int
    """The first of its lines, from 1."""
    text: str


@dataclass(frozen=True)
class SlurmScript:
    """A batch script."""

    options: Mapping[str, str]
    """sbatch's options by their long names; "" where one has no value."""
    lines: Mapping[str, int]
    """The line of each of them."""
    ignored: tuple[Command, ...]
    """Lines that look like options and that sbatch does not read."""
    commands: tuple[Command, ...]

    def where(self, option: str) -> str:
        """Return an option's name for a message, with its line in the file."""
        if option not in self.lines:
            return f"--{option}"
        return f"line {self.lines[option]}, --{option}"

    def search(self, pattern: str) -> Command | None:
        """Return the first command in which a regular expression is found."""
        return next(
            (command for command in self.commands if re.search(pattern, command.text)),
            None,
        )


def is_slurm(path: str | Path) -> bool:
    """Return whether a file is a batch script of Slurm's, by its name or its content."""
    try:
        text = read_file(path)
    except ConfigError:  # whoever reads it says so
        text = ""
    return (
        str(path).endswith((".sbatch", ".slurm"))
        or re.search(r"^#SBATCH\b", text, re.M) is not None
    )


def load_slurm(path: str | Path) -> SlurmScript:
    """Read a batch script; ConfigError for what sbatch would refuse."""
    source = str(path)
    lines = read_file(path).splitlines()
    options: dict[str, str] = {}
    places: dict[str, int] = {}
    ignored: list[Command] = []
    # sbatch reads options up to the first command, and takes the rest for comments
    is_read = True
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            is_read = False
        if is_read and line.startswith("#SBATCH"):
            found = _options(line.removeprefix("#SBATCH"), number, source)
            options |= found
            places |= dict.fromkeys(found, number)
        elif re.match(r"\s*#\s*SBATCH\s+-", line):
            ignored.append(Command(number, line.strip()))
    return SlurmScript(options, places, tuple(ignored), tuple(_commands(lines)))


def slurm_findings(script: SlurmScript) -> list[Finding]:
    """Return all remarks on a batch script."""
    step = script.search(r"\bsrun\b.*\bsymmetric-run\b") or script.search(
        r"\bsrun\b.*\b(?:python3?|torchrun|ray)\b"
    )
    text = "\n".join(command.text for command in script.commands)
    environment = common.assignments(text)
    return [
        *_ignored(script),
        *_misspelt(script),
        *_options_findings(script),
        *(_step(script, step) if step else ()),
        *common.key_findings(text),
        *_environment(script, environment),
        *_symmetric_run(script),
    ]


def _options(text: str, number: int, source: str) -> dict[str, str]:
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        rule = f"cannot be read ({str(error).lower()})"
        raise ConfigError(
            f"line {number}", text.strip(), rule, "close the quote", source
        ) from error
    found: dict[str, str] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
        elif word[:2] in _SHORT:
            name = _SHORT[word[:2]]
            value = word[2:]
        elif word.startswith("-") or name is None:
            name = None
            continue
        else:
            value = word
        found[name] = value
    return found


def _commands(lines: list[str]) -> list[Command]:
    found: list[Command] = []
    joined = False
    for number, line in enumerate(lines, start=1):
        if not joined and line.lstrip().startswith("#"):
            continue
        # A `#` with a quote after it may stand in a text.
        text = re.sub(r"(?:^|\s)#[^'\"]*$", "", line).strip()
        goes_on = text.endswith("\\")
        text = text.removesuffix("\\").strip()
        if joined:
            found[-1] = Command(found[-1].line, f"{found[-1].text} {text}")
        elif text:
            found.append(Command(number, text))
        joined = goes_on
    return found


def _ignored(script: SlurmScript) -> Iterator[Finding]:
    for line in script.ignored:
        rule = "is not read by sbatch: options stand as `#SBATCH`, before the first command"
        level = error if line.text.startswith("#SBATCH") else warning
        yield level(
            f"line {line.line}", line.text, rule, "move it up, or write `#SBATCH`"
        )


def _misspelt(script: SlurmScript) -> Iterator[Finding]:
    """Options and values that sbatch does not know."""
    known = _KNOWN.split()
    for name, value in script.options.items():
        if name not in known and sum(option.startswith(name) for option in known) != 1:
            fix = did_you_mean(name, known, "`sbatch --help` lists them", "--{}".format)
            yield error(
                script.where(name),
                value or MISSING,
                "is no option of sbatch's, which refuses the script",
                fix,
            )
        elif name in _FORMS and not re.fullmatch(_FORMS[name], value, re.IGNORECASE):
            rule = "is no value that sbatch takes here"
            yield error(
                script.where(name),
                value or MISSING,
                rule,
                "`man sbatch` says how it is written",
            )


def _options_findings(script: SlurmScript) -> Iterator[Finding]:
    options = dict(script.options)
    nodes = options.get("nodes", "1")
    tasks = options.get("ntasks", nodes)
    options.setdefault(
        "ntasks-per-node", "1" if tasks == nodes else f"{tasks} on {nodes} nodes"
    )
    for name, pattern, level, rule, fix in _OPTIONS:
        value = options.get(name)
        if value is None:
            yield warning(script.where(name), MISSING, rule, fix)
        elif not re.fullmatch(pattern, value):
            yield Finding(level, script.where(name), value, rule, fix)
    if options.get("signal"):
        name = options["signal"].rpartition(":")[2].partition("@")[0]
        name = name.removeprefix("SIG")
        # A trap of "" lets bash ignore the signal.
        if not script.search(rf"^trap\s+(?!\"\"|''|-\s).*\b(SIG)?{re.escape(name)}\b"):
            rule = f"must have a `trap` for {name} in the script: bash ends by it, and the job with it"
            fix = "add one that asks the command to stop, as in cluster/slurm.sbatch"
            yield error(script.where("signal"), options["signal"], rule, fix)


def _step(script: SlurmScript, step: Command) -> Iterator[Finding]:
    """Judge the `srun` that starts the training."""
    where = f"line {step.line}, srun"
    own_options = re.split(
        r"\s(?:ray|python3?|torchrun|bash|sh|env)\s", step.text, maxsplit=1
    )[0]
    is_told = re.search(r"\s(?:-c|--cpus-per-task|--cpu-bind=none)\b", own_options)
    if not is_told and not script.search(r"\bSRUN_CPUS_PER_TASK="):
        rule = "must say --cpus-per-task: since Slurm 22.05 srun takes it from no #SBATCH line, and Ray has one CPU"
        yield error(
            where, MISSING, rule, 'add `--cpus-per-task="$SLURM_CPUS_PER_TASK"`'
        )
    elif "$SLURM_CPUS_PER_TASK" in step.text and "cpus-per-task" not in script.options:
        rule = f"must be there: line {step.line} uses SLURM_CPUS_PER_TASK, which Slurm sets with it alone"
        yield error("--cpus-per-task", MISSING, rule, "add `#SBATCH --cpus-per-task=8`")
    later = [command.text for command in script.commands if command.line > step.line]
    waits = any(re.search(r"(?:^|[;{]|\bdo\b|&&)\s*wait\b", text) for text in later)
    in_background = re.search(r"&(?!&)\s*(?:\w+=\S*)?$", step.text)
    if in_background and not waits:
        rule = "is in the background and nothing waits for it: the job ends at once"
        yield error(
            where,
            MISSING,
            rule,
            "add `wait` after it, once more when a signal has ended the first",
        )
    elif not in_background and "signal" in script.options:
        rule = "must run in the background: bash heeds no signal before a command in the foreground has ended"
        yield error(where, MISSING, rule, "end it with `&`, and `wait` for it")


def _environment(
    script: SlurmScript, environment: Mapping[str, str]
) -> Iterator[Finding]:
    if not script.search(r"\bray\s+(?:start|symmetric-run)\b"):
        return
    yield from common.environment_findings({"the script": environment}, _OWN_DISK)
    if "RAY_TMPDIR" not in environment:
        rule = "should be set: /tmp/ray may be another user's, and a long TMPDIR breaks Ray's sockets"
        yield warning(
            "RAY_TMPDIR", MISSING, rule, "export RAY_TMPDIR=/tmp/paceline-$SLURM_JOB_ID"
        )


def _symmetric_run(script: SlurmScript) -> Iterator[Finding]:
    run = script.search(r"\bray\s+symmetric-run\b")
    if run is None:
        return
    where = f"line {run.line}, symmetric-run"
    for pattern, level, rule, fix in _SYMMETRIC_RUN:
        if not re.search(pattern, run.text):
            yield Finding(level, where, MISSING, rule, fix)
    if not script.search(r"\bRAY_ADDRESS="):
        rule = "must give the command RAY_ADDRESS, or it starts a Ray of its own on the head, and the other nodes idle"
        yield error(
            "RAY_ADDRESS",
            MISSING,
            rule,
            "write `env RAY_ADDRESS=HEAD:PORT` before the command",
        )
