"""Find errors in a Slurm script that sbatch does not: idle nodes and lost work.

The script is only read, never run.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from cluster.files.ray_up import read_file
from cluster.files.rules import assignments, environment_findings, key_findings
from cluster.finding import Finding, error
from trainers.errors import MISSING

_OWN_DISK = re.compile(
    r"(?:/tmp|/var/tmp|/dev/shm|/local|\$\{?(?:TMPDIR|SLURM_TMPDIR|RAY_TMPDIR)\}?)(?:/|$)"
)
_NEEDED = (
    (
        r"^#SBATCH\s.*--signal[= ]R?B:(?:SIG)?(\w+)@[\s\S]*^\s*trap\s+(?!\"\"|''|-\s).*\b(?:SIG)?\1\b",
        "--signal",
        "must tell this script (`B:`) before its limit, and a `trap` heed it, or what came after the last checkpoint is lost",
        "write `#SBATCH --signal=B:USR1@120` and a trap, as in cluster/slurm.sbatch",
    ),
    (
        r"\bsymmetric-run\b.*[^>&]&[ \t]*(?:\w+=\S*)?$[\s\S]*\bwait\b",
        "symmetric-run",
        "must run in the background, with a `wait` after it: bash heeds no signal before a command in the foreground ends",
        "end it with `&`, and `wait` for it",
    ),
    (
        r"\A(?![\s\S]*^#SBATCH\s.*--ntasks-per-node[= ](?!1\b))",
        "--ntasks-per-node",
        "must be one task a node: the second finds the first one's Ray, and ends",
        "write 1; Ray starts the workers",
    ),
    (
        r"\bsrun\b.*\s(?:--cpus-per-task|-c)\b.*\bsymmetric-run\b|\bSRUN_CPUS_PER_TASK=",
        "srun",
        "must say --cpus-per-task, which it takes from no #SBATCH line, or Ray has one CPU",
        'add `--cpus-per-task="$SLURM_CPUS_PER_TASK"`',
    ),
    (
        r"--address[=\s]+(?![\"']?(?:localhost|127\.|\[?::1))\S",
        "--address",
        "must be that of the first node in the network: every node would be a head of its own",
        'take it from `scontrol show hostnames "$SLURM_JOB_NODELIST"`',
    ),
    (
        r"--min-nodes[=\s]+[\"']?\$\{?SLURM_(JOB_NUM_NODES|NNODES)",
        "--min-nodes",
        "must be the job's nodes, or the command starts on the head alone, or never",
        'write `--min-nodes "$SLURM_JOB_NUM_NODES"`',
    ),
    (
        r"\bRAY_ADDRESS=",
        "RAY_ADDRESS",
        "must be given to the command, or it starts a Ray of its own on the head, and the other nodes idle",
        "write `env RAY_ADDRESS=HEAD:PORT` before the command",
    ),
)
"""What a script with `ray symmetric-run` must contain: for each requirement, a pattern,
and the field, rule and fix that are reported if it does not match.
"""


def slurm_findings(path: str | Path) -> Iterator[Finding]:
    """Yield all findings in a batch script that starts Ray on the job's nodes."""
    text = read_file(path)
    if "\r\n" in text:
        yield error(
            "the file",
            MISSING,
            "must not have Windows' line ends, with which sbatch refuses a script",
            "remove them with `sed -i 's/\\r$//' FILE`",
        )
        text = text.replace("\r\n", "\n")
    text = re.sub(r"^\s*#(?!SBATCH\b).*\n|\\\n", "", text, flags=re.MULTILINE)
    yield from key_findings(text)
    if "symmetric-run" not in text:
        return
    yield from environment_findings({"the script": assignments(text)}, _OWN_DISK)
    for pattern, field, rule, fix in _NEEDED:
        if not re.search(pattern, text, re.MULTILINE):
            yield error(field, MISSING, rule, fix)
