"""The command line of `python -m trainers | tune | cluster`.

A command is a function: its docstring says what it does, and its parameters are the
options. A mistake is said before torch and Ray are imported: one sentence on standard
error, and exit code 2.
"""

import atexit
import contextlib
import inspect
import io
import os
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, create_model

from trainers.config.model import Settings, build, child_model, keys_of
from trainers.config.reference import reference
from trainers.config.yaml import parse_yaml
from trainers.errors import (
    MISSING,
    ConfigError,
    ConfigErrors,
    PacelineError,
    did_you_mean,
    first_line,
    nearest,
    show,
)
from trainers.output import Json, Output, Quiet
from trainers.redaction import redact

_SOURCE = "command line"
_LONGEST = 2**15


class _Options(Settings):
    """Their descriptions are in their types: pydantic need not look for source, through
    every module there is.
    """

    model_config = ConfigDict(use_attribute_docstrings=False)


class Command:
    """A function as a command: the parameter before `*` is given without its name,
    `overrides` are keys of `config`.

    A bool is a flag, a tuple may be repeated, a field's title is shown as its value.
    `--name value` and `--name=value` are the same, and so are hyphens and underscores
    in a name. Values are YAML 1.2, except where text is wanted. A command that runs
    something takes an `output`, and has its options.
    """

    def __init__(
        self,
        call: str,
        function: Callable[..., Any],
        config: type[Settings] | None = None,
    ) -> None:
        parameters = dict(inspect.signature(function).parameters)
        self.call = call
        self.function = function
        self.config = config if parameters.pop("overrides", None) else None
        self.tells = parameters.pop("output", None) is not None
        hints = get_type_hints(function, include_extras=True)
        fields = {
            name: (hints[name], ... if p.default is p.empty else p.default)
            for name, p in parameters.items()
        }
        fields |= (
            {"quiet": (Quiet, False), "as_json": (Json, False)} if self.tells else {}
        )
        self.model = create_model(function.__name__, __base__=_Options, **fields)  # type: ignore[call-overload]
        self.fields = keys_of(self.model)
        self.argument = next(
            (name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY), ""
        )
        self.options = {
            _option(name): name for name in self.fields if name != self.argument
        }
        self.flags = [
            name
            for name, field in self.fields.items()
            if bool in (field.annotation, *get_args(field.annotation))
        ]
        self.tuples = [
            name
            for name, field in self.fields.items()
            if get_origin(field.annotation) is tuple
        ]

    def parse(self, args: Sequence[str]) -> dict[str, Any]:
        """What was typed as the function's parameters; raises ConfigError."""
        if sum(map(len, args)) > _LONGEST:
            rule = f"has more than {_LONGEST} characters"
            raise ConfigError(
                "the command", MISSING, rule, "write it into the file", _SOURCE
            )
        given: dict[str, Any] = {}
        overrides: dict[str, Any] = {}
        rest = list(args)
        while rest:
            arg = rest.pop(0)
            if not arg.startswith("-"):
                if not self.argument or (
                    self.argument in given and self.argument not in self.tuples
                ):
                    rule = f"is one argument too many for `{self.call}`"
                    raise ConfigError(arg or '""', MISSING, rule, "remove it", _SOURCE)
                self._give(given, self.argument, arg)
                continue
            typed, equals, text = arg.partition("=")
            name = self.options.get(typed.replace("_", "-"))
            key = "" if name else self._key(typed)
            if not equals and name in self.flags:
                text = "true"
            elif not equals:
                if not rest or rest[0].startswith("--"):
                    raise ConfigError(
                        typed,
                        MISSING,
                        "needs a value",
                        f"write `{typed} VALUE`",
                        _SOURCE,
                    )
                text = rest.pop(0)
            if name:
                self._give(given, name, text)
            else:
                overrides[key] = parse_yaml(text, f"{_SOURCE}, --{key}")
        try:
            built = build(self.model, given, _SOURCE)
        except ConfigError as error:
            raise ConfigErrors(
                [self._as_typed(one) for one in getattr(error, "errors", [error])]
            ) from None
        values = {name: getattr(built, name) for name in self.model.model_fields}
        if self.tells:
            values["output"] = Output(values.pop("quiet"), values.pop("as_json"))
        return {**values, "overrides": overrides} if self.config else values

    def _give(self, given: dict[str, Any], name: str, text: str) -> None:
        kind = self.fields[name].annotation
        if name in self.tuples:
            given[name] = (*given.get(name, ()), text)
        else:
            given[name] = (
                text
                if str in (kind, *get_args(kind))
                else parse_yaml(text, f"{_SOURCE}, {_option(name)}")
            )

    def _key(self, typed: str) -> str:
        """An unknown option as a key of the configuration; names in a mapping of the
        user's own stay as they are.
        """
        parts = typed.removeprefix("--").split(".")
        model = self.config
        for index, part in enumerate(parts):
            if model is not None and (ours := part.replace("-", "_")) in keys_of(model):
                parts[index], model = ours, child_model(model, ours)
        first = parts[0].replace("_", "-")
        keys = (
            [key.replace("_", "-") for key in keys_of(self.config)]
            if self.config
            else []
        )
        options = [option.removeprefix("--") for option in self.options]
        near = None if first in keys else nearest(first, [*keys, *options])
        if not keys or not typed.startswith("--") or typed == "--" or near in options:
            listed = f"its options are {', '.join([*self.options, '--help'])}"
            fix = did_you_mean(first, [*keys, *options], listed, _option)
            raise ConfigError(
                typed, MISSING, f"is not an option of `{self.call}`", fix, _SOURCE
            )
        return ".".join(parts)

    def _as_typed(self, error: ConfigError) -> ConfigError:
        """What is wrong with a parameter, said of the option or the argument."""
        name = error.field.partition("[")[0]
        shown = self._shown(name)
        fix = (
            f"write `{self.call} {shown}`"
            if name == self.argument
            else f"write `{shown}`"
        )
        return ConfigError(shown.split()[0], error.value, error.rule, fix, _SOURCE)

    def _shown(self, name: str) -> str:
        value = self.fields[name].title or name.upper()
        return (
            value
            if name == self.argument
            else _option(name)
            if name in self.flags
            else f"{_option(name)} {value}"
        )

    def help(self) -> str:
        """How the command is typed, what it does, and what its options mean."""
        required = [
            self._shown(name)
            for name, field in self.fields.items()
            if field.is_required()
        ]
        usage = [
            "usage:",
            self.call,
            *required,
            "[options]",
            *["[--dotted.key value]..."] * bool(self.config),
        ]
        lines = [
            " ".join(usage),
            "    " + (inspect.getdoc(self.function) or "").replace("\n", "\n    "),
        ]
        for name, field in self.fields.items():
            default = (
                f" (default: {show(field.default)})"
                if not field.is_required() and field.default
                else ""
            )
            text = f"      {self._shown(name):<25} {field.description}{default}"
            lines += textwrap.wrap(text, 110, subsequent_indent=" " * 32)
        return "\n".join(lines)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def run(
    call: str,
    doc: str | None,
    functions: Mapping[str, Callable[..., int]],
    argv: Sequence[str] | None,
    config: type[Settings] | None = None,
    advise: bool = False,
) -> int:
    """Run the command that is named first, or else the one without a name; return its
    exit code.

    `doc` is the docstring of the module that `call` starts; its last paragraph says the
    exit codes. `config` is the configuration of commands with `overrides`. `advise`:
    failures of the one without a name end in a policy's advice.
    """
    sys.excepthook = lambda *raised: print(
        redact("".join(traceback.format_exception(*raised))), file=sys.stderr
    )
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # a name or a message may have what its encoding has not
        sys.stdout.reconfigure(errors="backslashreplace")
    args = list(sys.argv[1:] if argv is None else argv)
    name = args[0] if args and args[0] in functions else ""

    def command(
        word: str,
    ) -> (
        Command
    ):  # those that are not asked for are not made: their models take 10 ms each
        return Command(f"{call} {word}".rstrip(), functions[word], config)

    if args == ["--schema"] and config is not None:
        package = call.rpartition(" ")[2]
        print(
            (Path(__file__).parent.parent / package / "schema.json").read_text(), end=""
        )
        return 0
    if not args or {"-h", "--help"} & set(args):
        about, _, exit_codes = (doc or "").strip().rpartition("\n\n")
        # Of two names of one function the newer.
        newest = {function: word for word, function in functions.items()}
        shown = (
            [command(name).help()]
            if name
            else [about, *(command(word).help() for word in newest.values())]
        )
        if config is not None and not name:
            exit_codes += f"\n\n`{call} --schema` prints the JSON schema of its file, for editors.\n\n{reference(config)}"
        print(*shown, exit_codes, sep="\n\n")
        return 0 if args else 2
    is_unknown = not name and ("" not in functions or _is_mistyped(args[0], functions))
    chosen = None if is_unknown else command(name)
    # A mistake beside `--json` is said in JSON, too.
    with Output(
        as_json="--json" in args and (chosen is None or chosen.tells)
    ) as output:
        try:
            _require_directory()
            if chosen is None:
                listed = f"its commands are {', '.join(filter(None, functions))}"
                fix = (
                    listed
                    if args[0].startswith("-")
                    else did_you_mean(args[0], functions, listed)
                )
                raise ConfigError(
                    args[0], MISSING, f"is not a command of `{call}`", fix, _SOURCE
                )
            values = chosen.parse(args[1:] if name else args)
            if chosen.tells:
                values["output"] = output.wanting(values["output"])
            code: int = chosen.function(**values)
            return code
        except PacelineError as error:
            is_config = error.exit_code == ConfigError.exit_code
            advice = "" if name or not advise or is_config else error.advice
            # What a configuration lacks every rank of torchrun's says alike; of
            # failures each has its own.
            complain(
                f"{error} ({advice})" if advice else str(error),
                every_rank=not is_config,
            )
            return output.failed(error.status, str(error), error.exit_code, advice)
        except KeyboardInterrupt:
            complain("interrupted")
            return output.failed("interrupted", "interrupted", 130)
        except Exception as error:  # the user's own, from a constructor; or one of ours that nobody has foreseen
            sys.excepthook(type(error), error, error.__traceback__)
            words = f"{type(error).__name__}: {first_line(error)}"
            complain(words, every_rank=True)
            return output.failed("error", words, PacelineError.exit_code)


def _is_mistyped(word: str, functions: Mapping[str, Callable[..., int]]) -> bool:
    """Whether a word is almost a command, and can hardly be a file."""
    is_bare = word.replace("-", "").replace("_", "").isalpha()
    near = nearest(word, functions, cutoff=0.7) if is_bare else None
    return near is not None and not Path(word).exists()


def leave(code: int) -> NoReturn:
    """End the process.

    Threads and exit handlers come to their end; torch's modules are not torn down,
    which takes a second.
    """
    threading._shutdown()  # type: ignore[attr-defined] # (what Python itself calls first)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _require_directory() -> None:
    """Raise ConfigError where the working directory was deleted: no relative name means
    anything then.
    """
    try:
        Path.cwd()
    except FileNotFoundError as error:
        fix = "change to one that is there"
        raise ConfigError(
            "the working directory", MISSING, "was deleted", fix, _SOURCE
        ) from error


def complain(sentences: str, level: str = "error", every_rank: bool = False) -> None:
    """Print on standard error, a line each; once for all of torchrun's workers, or by
    `every_rank`.
    """
    if every_rank or os.environ.get("RANK", "0") == "0":
        for line in redact(sentences).splitlines():
            print(f"{level}: {line}", file=sys.stderr)
