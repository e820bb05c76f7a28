"""What the rules of `ray up` and of KubeRay files say in the same words."""

DIFFERS = "differs from {}, which Paceline has here"
HEAD_WORKS = "should be 0 on the head: work there slows the scheduler, and can end the cluster"
HEAD_WORKS_FIX = "and let workers do it"
OPEN_PORT = "must not open a port to the world: the Jobs API runs any code that reaches it"
SECRET = "must not stand in the file: it is a secret"  # noqa: S105 (a sentence)
