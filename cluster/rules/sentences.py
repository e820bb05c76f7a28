"""What the rules of all kinds of files say in the same words, and look for in the same way."""

import re

DIFFERS = "differs from {}, which Paceline has here"
HEAD_WORKS = "should be 0 on the head: work there slows the scheduler, and can end the cluster"
HEAD_WORKS_FIX = "and let workers do it"
OPEN_PORT = "must not open a port to the world: the Jobs API runs any code that reaches it"
SECRET = "must not stand in the file: it is a secret"  # noqa: S105 (a sentence)
# Keys of AWS, of Google and of anybody, and passwords in an address; what they match is never shown.
KEYS = re.compile(
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|PRIVATE KEY-----|\b(?:AWS_SECRET_ACCESS_KEY|AZURE_CLIENT_SECRET)=|"
    r"\bAccountKey=|aws_secret_access_key|://[^\s/:@'\"]*:[^\s/@'\"]+@"
)
