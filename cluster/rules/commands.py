"""What the commands of a `ray up` file set where Ray starts, and which files it brings to the nodes."""

import re

from cluster.files.cluster_file import ClusterFile

HEAD, WORKER = "head_start_ray_commands", "worker_start_ray_commands"


def exported(cluster: ClusterFile, field: str, name: str) -> str | None:
    """Return the value that `name` has where `ray start` runs: set in that command, or in a profile by set-up.

    Each command has a shell of its own, so an export in another start command does not count.
    """
    setup = "head_setup_commands" if field.startswith("head") else "worker_setup_commands"
    both = [*cluster.commands["setup_commands"], *cluster.commands[setup]]
    profile = [command for command in both if "bashrc" in command or "profile" in command]
    starts = [command.split("ray start")[0] for command in cluster.commands[field] if "ray start" in command]
    found = None
    for command in [*profile, *starts]:
        for match in re.finditer(rf"(?<!\w){name}=(\"[^\"]*\"|'[^']*'|[^\s;&|'\"]*)", command):
            found = match[1].strip("'\"")
    return found


def brings(cluster: ClusterFile, place: str) -> bool:
    """Return whether `file_mounts` brings a file to a place on the nodes; $HOME, /home/ubuntu and /root are what `~`
    means there.
    """
    place = re.sub(r"^\$\{?HOME\}?(?=/)", "~", place)
    mounts: list[str] = list(cluster.config["file_mounts"])
    return any(
        mount == place or (place.startswith("~") and mount.startswith("/") and mount.endswith(place[1:]))
        for mount in mounts
    )
