"""What Slurm and `ray symmetric-run` accept in a batch script and what then hangs, meets another job, or is lost."""

import re
import shlex
from collections.abc import Iterator

from cluster.files.slurm import Command, SlurmScript
from cluster.finding import Finding, error, warning
from cluster.rules.sentences import KEYS, SECRET
from trainers.errors import MISSING

_JOBS_NODES = ("$SLURM_JOB_NUM_NODES", "${SLURM_JOB_NUM_NODES}", "$SLURM_NNODES", "${SLURM_NNODES}")
_GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")
_SIGNALS = {"1": "HUP", "2": "INT", "10": "USR1", "12": "USR2", "15": "TERM"}
_NOTICE_S = 60
"""Seconds for a checkpoint, then the end of Ray on all nodes: some 20 of them, measured."""
_EARLY_S = 60
"""By so much Slurm may be early with a signal: `man sbatch`, --signal."""
_OWN_DISK = re.compile(r"(?:/tmp|/var/tmp|/dev/shm|/local|\$\{?(?:TMPDIR|SLURM_TMPDIR|RAY_TMPDIR)\}?)(?:/|$)")
_EACH_TIME = re.compile(r"RANDOM|RESTART_COUNT|\$\((?:date|mktemp|uuidgen)|`")
_LONGEST_TMPDIR = 28
"""Bytes: a socket's path has 107, and Ray puts some 79 below RAY_TMPDIR."""
_WORKER_PORTS = range(10002, 20000)


def slurm_findings(script: SlurmScript) -> list[Finding]:
    """Return all remarks on a batch script."""
    step = script.search(r"\bsrun\b.*\bsymmetric-run\b") or script.search(r"\bsrun\b.*\b(?:python3?|torchrun|ray)\b")
    return [
        *_ignored(script),
        *_placement(script, step),
        *_limit(script),
        *_signal(script),
        *_waiting(script, step),
        *_back(script),
        *_environment(script, step),
        *_storage(script),
        *(_ray(script) if script.search(r"\bray\s+(?:start|symmetric-run)\b") else ()),
        *_symmetric_run(script),
    ]


def _ignored(script: SlurmScript) -> Iterator[Finding]:
    for line in script.ignored:
        rule = "is not read by sbatch: options stand as `#SBATCH`, before the first command"
        level = error if line.text.startswith("#SBATCH") else warning
        yield level(f"line {line.line}", line.text, rule, "move it up, or write `#SBATCH`")


def _placement(script: SlurmScript, step: Command | None) -> Iterator[Finding]:
    nodes, per_node, tasks = (script.options.get(name) for name in ("nodes", "ntasks-per-node", "ntasks"))
    rule = "must be one task a node: the second on a node finds the first one's Ray, and ends"
    if per_node not in (None, "1"):
        yield error(script.where("ntasks-per-node"), per_node, rule, "write 1; Ray starts the workers")
    elif tasks is not None and per_node is None and tasks != (nodes or "1"):
        yield error(script.where("ntasks"), tasks, rule, "write `--ntasks-per-node=1` in its place")
    if script.options.get("exclusive") != "":
        rule = "must give whole nodes: symmetric-run refuses one with another Ray, and at its end stops each of yours"
        yield warning(script.where("exclusive"), script.options.get("exclusive", MISSING), rule, "write `--exclusive`")
    asked = any(name in script.options for name in _GPU_OPTIONS) or "gpu" in script.options.get("gres", "")
    used = script.search(r"--num-gpus[=\s]+[\"']?[1-9]|use_gpu[=\s]+true")
    if used and not asked:
        rule = "must ask for the GPUs that are used, or no node with one is given"
        yield error("--gpus-per-node", MISSING, rule, f"add it, or use none in line {used.line}")
    if step is None:
        return
    told = re.search(r"\s(?:-c|--cpus-per-task|--cpu-bind=none)\b", _own_options(step))
    if told is None and not script.search(r"\bSRUN_CPUS_PER_TASK="):
        rule = "must say --cpus-per-task: since Slurm 22.05 srun takes it from no #SBATCH line, and Ray has one CPU"
        fix = 'add `--cpus-per-task="$SLURM_CPUS_PER_TASK"`'
        yield error(f"line {step.line}, srun", MISSING, rule, fix)
    elif "$SLURM_CPUS_PER_TASK" in step.text and "cpus-per-task" not in script.options:
        rule = f"must be there: line {step.line} uses SLURM_CPUS_PER_TASK, which Slurm sets with it alone"
        yield error("--cpus-per-task", MISSING, rule, "add `#SBATCH --cpus-per-task=8`")


def _limit(script: SlurmScript) -> Iterator[Finding]:
    if "time" not in script.options:
        rule = "should be there: without it the partition decides, in minutes at some sites"
        yield warning("--time", MISSING, rule, "add `#SBATCH --time=04:00:00`")


def _signal(script: SlurmScript) -> Iterator[Finding]:
    value = script.options.get("signal")
    if value is None:
        rule = "should tell the script before the time limit, or what came after the last checkpoint is lost"
        yield warning(
            "--signal", MISSING, rule, "add `#SBATCH --signal=B:USR1@120` and a trap, as in cluster/slurm.sbatch"
        )
        return
    match = re.fullmatch(r"(?:([RB]+):)?(\w+?)(?:@(\d+))?", value)
    if match is None:  # sbatch says so itself
        return
    where, name = script.where("signal"), _name(match[2])
    notice_s, limit_s = int(match[3] or 60), _seconds(script.options.get("time", ""))
    if "B" not in (match[1] or ""):
        rule = "must begin with `B:`: without it Ray's processes are told, which end by it, and not this script"
        yield error(where, value, rule, f"write B:{name}@{max(notice_s, 120)}")
    if name not in _trapped(script):
        rule = f"must have a `trap` for {name} in the script: bash ends by it, and the job with it"
        yield error(where, value, rule, "add one that asks the command to stop, as in cluster/slurm.sbatch")
    if notice_s < _NOTICE_S:
        rule = f"should come {_NOTICE_S} s or more before the end: a checkpoint, then the end of Ray on all nodes"
        yield warning(where, value, rule, "write @120, or more where a checkpoint takes longer")
    if limit_s is not None and limit_s <= notice_s + _EARLY_S:
        rule = f"may come at the start already, with a --time of {limit_s} s: no try would get anywhere"
        yield error(where, value, rule, "raise --time")
    if not script.search(r"\bscontrol\s+requeue\b"):
        rule = "stops the command, and nothing puts the job back into the queue"
        yield warning(where, value, rule, 'end the script with `scontrol requeue "$SLURM_JOB_ID"` when the signal came')


def _waiting(script: SlurmScript, step: Command | None) -> Iterator[Finding]:
    if step is None:
        return
    where, in_background = f"line {step.line}, srun", step.text.rstrip().endswith("&")
    waits = any(re.search(r"(?:^|[;{]|\bdo\b|&&)\s*wait\b", c.text) for c in script.commands if c.line > step.line)
    if _trapped(script) and not in_background:
        rule = "must run in the background: bash heeds no signal before a command in the foreground has ended"
        yield error(where, MISSING, rule, "end it with `&`, and `wait` for it")
    elif in_background and not waits:
        rule = "is in the background and nothing waits for it: the job ends at once"
        yield error(where, MISSING, rule, "add `wait` after it, once more when a signal has ended the first")


def _back(script: SlurmScript) -> Iterator[Finding]:
    """What a job needs that comes back."""
    if "no-requeue" in script.options:
        rule = "must not be there: the job does not come back after its time, or when a node dies"
        yield error(script.where("no-requeue"), MISSING, rule, "write `--requeue`")
        return
    if "requeue" not in script.options:
        rule = "should be there: whether a job may come back without it is the site's choice"
        yield warning("--requeue", MISSING, rule, "add `#SBATCH --requeue`")
    if script.options.get("open-mode") != "append":
        rule = "should be append, or the job that comes back deletes the log of its first try"
        yield warning(script.where("open-mode"), script.options.get("open-mode", MISSING), rule, "write append")
    if "array" in script.options and not script.search("SLURM_ARRAY_TASK_ID"):
        rule = "makes jobs that are one run: they would take its directory from each other"
        fix = "add `--name run-$SLURM_ARRAY_TASK_ID` to the command, or let a sweep try the values"
        yield error(script.where("array"), script.options["array"], rule, fix)


def _environment(script: SlurmScript, step: Command | None) -> Iterator[Finding]:
    export = script.options.get("export")
    kept = export is None or "ALL" in export.upper().split(",")
    if step and not kept and "--export" not in _own_options(step):
        rule = "holds for srun as well: nothing that this script exports, the token among it, reaches a node"
        yield error(script.where("export"), export, rule, f"write `srun --export=ALL` in line {step.line}")
    for command in script.commands:
        if KEYS.search(command.text):
            yield error(f"line {command.line}", MISSING, SECRET, "keep it in your home, readable for you alone")


def _storage(script: SlurmScript) -> Iterator[Finding]:
    found = script.assignment("PACELINE_STORAGE")
    if found is None:
        if not script.search(r"--storage_path\b"):
            rule = "must be exported, or runs lie in ./results of where you typed sbatch"
            fix = "put `export PACELINE_STORAGE=/shared/...` before srun"
            yield warning("PACELINE_STORAGE", MISSING, rule, fix)
        return
    value, line = found
    where = f"line {line}, PACELINE_STORAGE"
    if _OWN_DISK.match(value):
        rule = "is on each node's own disk, where neither another node nor the next try finds a checkpoint"
        yield error(where, value, rule, "name a directory that all nodes share, or a bucket")
    elif _EACH_TIME.search(value):
        rule = "is another place in each try: the job that comes back starts from the beginning"
        yield error(where, value, rule, "write one place for all tries")


def _ray(script: SlurmScript) -> Iterator[Finding]:
    mode = script.assignment("RAY_AUTH_MODE")
    if mode is None or mode[0] != "token":
        where = f"line {mode[1]}, RAY_AUTH_MODE" if mode else "RAY_AUTH_MODE"
        rule = "must turn token authentication on, or any user who reaches a node runs code as you"
        yield error(where, mode[0] if mode else MISSING, rule, "put `export RAY_AUTH_MODE=token` before srun")
    token = script.assignment("RAY_AUTH_TOKEN")
    if token and not token[0].startswith("$"):
        fix = "leave it in ~/.ray/auth_token (made by `ray get-auth-token --generate`)"
        yield error(f"line {token[1]}, RAY_AUTH_TOKEN", MISSING, SECRET, fix)
    directory = script.assignment("RAY_TMPDIR")
    if directory is None:
        rule = "should be set: /tmp/ray may be another user's, and a long TMPDIR breaks Ray's sockets"
        yield warning("RAY_TMPDIR", MISSING, rule, "export RAY_TMPDIR=/tmp/paceline-$SLURM_JOB_ID")
        return
    path = re.sub(r"\$\{?SLURM_JOB_ID\}?", "12345678", directory[0])
    if "$" not in path and len(path) > _LONGEST_TMPDIR:
        rule = f"must have at most {_LONGEST_TMPDIR} characters: a socket's path has 107, and Ray adds the others"
        yield error(f"line {directory[1]}, RAY_TMPDIR", directory[0], rule, "write a shorter one, below /tmp")


def _symmetric_run(script: SlurmScript) -> Iterator[Finding]:
    run = script.search(r"\bray\s+symmetric-run\b")
    if run is None:
        return
    where, nodes = f"line {run.line}, symmetric-run", script.options.get("nodes")
    least = re.search(r"--min-nodes[=\s]+[\"']?([^\s\"']+)", run.text)
    if least is None and nodes not in (None, "1"):
        rule = "must wait for all nodes, or the command starts on the head alone"
        yield error(where, MISSING, rule, 'add `--min-nodes "$SLURM_JOB_NUM_NODES"`')
    elif least and least[1] not in (*_JOBS_NODES, nodes or "1"):
        rule = "must be the number of the job's nodes: it waits for exactly so many, and gives up"
        yield error(f"{where} --min-nodes", least[1], rule, "write $SLURM_JOB_NUM_NODES")
    if address := re.search(r"--address[=\s]+[\"']?([^\s\"']+)", run.text):
        yield from _address(script, where, address[1])
    if not script.search(r"\bRAY_ADDRESS="):
        rule = "must give the command RAY_ADDRESS, or it starts a Ray of its own on the head, and the other nodes idle"
        yield error("RAY_ADDRESS", MISSING, rule, "write `env RAY_ADDRESS=HEAD:PORT` before the command")


def _address(script: SlurmScript, where: str, address: str) -> Iterator[Finding]:
    if named := re.fullmatch(r"\$\{?(\w+)\}?", address):
        found = script.assignment(named[1])
        address = found[0] if found else address
    host, _, port = address.rpartition(":")
    if re.match(r"localhost$|127\.|\[?::1", host):
        rule = "must be the first node's address in the network: every node would be a head of its own"
        yield error(f"{where} --address", address, rule, 'take it from `scontrol show hostnames "$SLURM_JOB_NODELIST"`')
    if port.isdigit():
        level = error if int(port) in _WORKER_PORTS else warning
        rule = "must have a port of this job's own: another job may use it, and 10002 to 19999 are Ray's workers'"
        yield level(f"{where} --address", address, rule, "write $((20000 + SLURM_JOB_ID % 10000))")


def _own_options(step: Command) -> str:
    """What is srun's, of a command that it starts."""
    return re.split(r"\s(?:ray|python3?|torchrun|bash|sh|env)\s", step.text, maxsplit=1)[0]


def _trapped(script: SlurmScript) -> set[str]:
    """The signals that a `trap` heeds."""
    found: set[str] = set()
    for command in script.commands:
        if command.text.startswith("trap "):
            try:
                _, action, *names = [*shlex.split(command.text), ""]
            except ValueError:  # a text that goes on in the next line; its signals stand there
                continue
            # "" lets bash ignore the signal, and - end by it.
            found |= {_name(name) for name in names if action not in ("", "-")}
    return found - {"EXIT", "0", "ERR", ""}


def _name(signal: str) -> str:
    return _SIGNALS.get(signal, signal.upper().removeprefix("SIG"))


def _seconds(time: str) -> int | None:
    """A time limit in seconds, in the forms of `man sbatch`: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        return None
    days, *parts = (int(part) if part else 0 for part in match.groups())
    if match[1] is None and match[4] is None:
        parts = [0, *parts[:2]]  # minutes and seconds
    return days * 86400 + parts[0] * 3600 + parts[1] * 60 + parts[2]
