"""The command line of `python -m trainers | tune | cluster`, and the help it prints.

A command is a function: its docstring says what it does, and its parameters
are the options. Mistakes are reported before torch and Ray are imported: one
sentence on standard error, and exit code 2.
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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, create_model

from trainers.config.model import Settings, Tree, build, child_model, keys_of
from trainers.config.yaml import parse_typed
from trainers.errors import (
    MISSING,
    ConfigError,
    PacelineError,
    did_you_mean,
    first_line,
    nearest,
    redact,
    show,
)
from trainers.output import Json, Output, Quiet, torchrun_rank

_SOURCE = "command line"


class _Options(Settings):
    """A command's options; the type of an option contains its description.

    With `use_attribute_docstrings`, Pydantic would search every module's
    source for descriptions.
    """

    model_config = ConfigDict(use_attribute_docstrings=False)


class Command:
    """A function as a command: its parameters are the options.

    A parameter before `*` is a positional argument; `overrides` receives keys
    of `config`.

    A bool is a flag, an option with the type tuple may be repeated, and the
    help shows a field's title in place of the value. `--name value` and
    `--name=value` are equivalent; hyphens and underscores in a name are, too.
    Values are YAML 1.2, unless the type is str. A command that runs something
    has a parameter `output`, and thus the options --quiet and --json.
    """

    def __init__(
        self,
        call: str,
        function: Callable[..., Any],
        config: type[Settings] | None = None,
    ) -> None:
        self.call = call
        self.function = function
        self.argument = ""
        hints = get_type_hints(function, include_extras=True)
        fields: Tree = {}
        parameters = dict(inspect.signature(function).parameters)
        self.config = config if parameters.pop("overrides", None) else None
        self.tells = parameters.pop("output", None) is not None
        for name, parameter in parameters.items():
            is_required = parameter.default is parameter.empty
            default = ... if is_required else parameter.default
            fields[name] = (hints[name], default)
            if parameter.kind is not parameter.KEYWORD_ONLY:
                self.argument = name
        if self.tells:
            fields |= {"quiet": (Quiet, False), "as_json": (Json, False)}
        self.model = create_model(
            function.__name__, __base__=_Options, **fields
        )
        self.fields = keys_of(self.model)
        self.options = {
            _option(name): name
            for name in self.fields
            if name != self.argument
        }

    def parse(self, args: Sequence[str]) -> Tree:
        """Convert arguments to the function's parameters; raises ConfigError."""
        given: Tree = {}
        overrides: Tree = {}
        rest = deque(args)
        while rest:
            arg = rest.popleft()
            if not arg.startswith("-"):
                self._give_argument(given, arg)
                continue
            typed, equals, text = arg.partition("=")
            name = self.options.get(typed.replace("_", "-"))
            key = "" if name else self._key(typed)
            if not equals and name and self._is(name, bool):
                text = "true"
            elif not equals:
                text = _next(rest, typed)
            if name:
                self._give(given, name, text)
            else:
                overrides[key] = parse_typed(text, f"{_SOURCE}, --{key}")
        built = build(self.model, given, _SOURCE)
        values = {
            name: getattr(built, name) for name in self.model.model_fields
        }
        if self.tells:
            values["output"] = Output(
                values.pop("quiet"), values.pop("as_json")
            )
        if self.config:
            values["overrides"] = overrides
        return values

    def _is(self, name: str, kind: type) -> bool:
        """Whether a parameter has this type, or a union that contains it."""
        annotation = self.fields[name].annotation
        return kind in (
            annotation,
            get_origin(annotation),
            *get_args(annotation),
        )

    def _give_argument(self, given: Tree, text: str) -> None:
        name = self.argument
        if not name or (name in given and not self._is(name, tuple)):
            rule = f"is one argument too many for `{self.call}`"
            raise _mistake(text or '""', rule, "remove it")
        self._give(given, name, text)

    def _give(self, given: Tree, name: str, text: str) -> None:
        if self._is(name, tuple):
            given[name] = (*given.get(name, ()), text)
        elif self._is(name, str):
            given[name] = text
        else:
            given[name] = parse_typed(text, f"{_SOURCE}, {_option(name)}")

    def _key(self, typed: str) -> str:
        """Return an unknown option as a dotted key of the configuration.

        Hyphens become underscores, except within a mapping whose keys are free
        (`task_args`).
        """
        parts = typed.removeprefix("--").split(".")
        keys: list[str] = []
        if self.config is not None:
            keys = [key.replace("_", "-") for key in keys_of(self.config)]
        first = parts[0].replace("_", "-")
        options = [option.removeprefix("--") for option in self.options]
        near = None if first in keys else nearest(first, [*keys, *options])
        if (
            not keys
            or not typed.startswith("--")
            or typed == "--"
            or near in options
        ):
            listed = f"use one of {', '.join([*self.options, '--help'])}"
            fix = did_you_mean(first, [*keys, *options], listed, _option)
            raise _mistake(typed, f"is not an option of `{self.call}`", fix)
        model = self.config
        for index, part in enumerate(parts):
            name = part.replace("-", "_")
            if model is not None and name in keys_of(model):
                parts[index] = name
                model = child_model(model, name)
        return ".".join(parts)

    def _shown(self, name: str) -> str:
        value = self.fields[name].title or name.upper()
        if name == self.argument:
            return value
        if self._is(name, bool):
            return _option(name)
        return f"{_option(name)} {value}"

    def help(self) -> str:
        """Return the command's usage, description and options."""
        usage = ["usage:", self.call]
        options = []
        for name, field in self.fields.items():
            default = ""
            if field.is_required():
                usage.append(self._shown(name))
            elif field.default:
                default = f" (default: {show(field.default)})"
            text = (
                f"      {self._shown(name):<25} {field.description}{default}"
            )
            options += textwrap.wrap(text, 110, subsequent_indent=" " * 32)
        usage.append("[options]")
        if self.config:
            usage.append("[--dotted.key value]...")
        about = textwrap.indent(inspect.getdoc(self.function) or "", "    ")
        return "\n".join([" ".join(usage), about, *options])


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _mistake(typed: str, rule: str, fix: str) -> ConfigError:
    return ConfigError(typed, MISSING, rule, fix, _SOURCE)


def _next(rest: deque[str], typed: str) -> str:
    """Take an option's value from the remaining arguments."""
    if not rest or rest[0].startswith("--"):
        raise _mistake(typed, "needs a value", f"write `{typed} VALUE`")
    return rest.popleft()


@dataclass(frozen=True)
class _Door:
    """The commands of one module."""

    call: str
    functions: Mapping[str, Callable[..., int]]
    config: type[Settings] | None

    def command(self, name: str) -> Command:
        """Build a command; done only on demand, because building one takes 10 ms."""
        call = f"{self.call} {name}".rstrip()
        return Command(call, self.functions[name], self.config)

    def named(self, args: Sequence[str]) -> str:
        """Return the name of the command in `args`; empty for the unnamed command."""
        return args[0] if args and args[0] in self.functions else ""

    def tells(self, args: Sequence[str]) -> bool:
        """Whether the command in `args` reports through an Output, or is unknown."""
        function = self.functions.get(self.named(args))
        return (
            function is None
            or "output" in inspect.signature(function).parameters
        )

    def help(self, doc: str, args: Sequence[str]) -> str:
        """Return the help of the command in `args`, or of all commands."""
        about, _, end = doc.strip().rpartition("\n\n")
        name = self.named(args)
        if name:
            return "\n\n".join([self.command(name).help(), end])
        # A function with two names is listed under its last name.
        names = {function: name for name, function in self.functions.items()}
        parts = [about]
        parts += [self.command(name).help() for name in names.values()]
        parts.append(end)
        if self.config is not None:
            schema = f"`{self.call} --schema` prints the JSON schema of the configuration file, for editors."
            parts += [schema, reference(self.config)]
        return "\n\n".join(parts)

    def start(self, args: Sequence[str], output: Output) -> int:
        """Run the command in `args`; raise ConfigError if `args` are not valid."""
        name = self.named(args)
        names = [known for known in self.functions if known]
        has_unnamed = "" in self.functions and not _is_mistyped(args, names)
        if not name and not has_unnamed:
            fix = f"use one of {', '.join(names)}"
            if not args[0].startswith("-"):
                fix = did_you_mean(args[0], names, fix)
            raise _mistake(args[0], f"is not a command of `{self.call}`", fix)
        command = self.command(name)
        values = command.parse(args[1:] if name else args)
        if command.tells:
            values["output"] = output.wanting(values["output"])
        code: int = command.function(**values)
        return code


def run(
    call: str,
    doc: str | None,
    functions: Mapping[str, Callable[..., int]],
    argv: Sequence[str] | None,
    config: type[Settings] | None = None,
    advise: bool = False,
) -> int:
    """Run the command that `argv` names, else the unnamed one; return the exit code.

    `doc` is the docstring of the module that `call` starts; its last paragraph
    lists the exit codes. `config` is the configuration class of commands that
    take `overrides`. With `advise`, failures of the unnamed command end with
    advice from the status's policy.
    """
    sys.excepthook = lambda *raised: print(
        redact("".join(traceback.format_exception(*raised))), file=sys.stderr
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Messages may have characters that the encoding lacks. Ray prints the
        # output of workers without flushing.
        sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    args = list(sys.argv[1:] if argv is None else argv)
    door = _Door(call, functions, config)
    if args == ["--schema"] and config is not None:
        package = call.rpartition(" ")[2]
        schema = Path(__file__).parent.parent / package / "schema.json"
        print(schema.read_text(), end="")
        return 0
    if not args or {"-h", "--help"} & set(args):
        print(door.help(doc or "", args))
        return 0 if args else 2
    # With `--json`, mistakes in arguments are JSON, too.
    with Output(as_json="--json" in args and door.tells(args)) as output:
        try:
            return door.start(args, output)
        except PacelineError as error:
            is_config = error.exit_code == ConfigError.exit_code
            advice = ""
            words = str(error)
            if advise and not is_config and not door.named(args):
                advice = error.advice
            # Under torchrun, all ranks find the same mistake in a
            # configuration, but each has its own failure.
            said = f"{words} ({advice})" if advice else words
            complain(said, every_rank=not is_config)
            return output.failed(error.status, words, error.exit_code, advice)
        except KeyboardInterrupt:
            complain("interrupted")
            return output.failed("interrupted", "interrupted", 130)
        except Exception as error:
            # From the user's code, such as a constructor; or a bug of ours.
            sys.excepthook(type(error), error, error.__traceback__)
            words = f"{type(error).__name__}: {first_line(error)}"
            complain(words, every_rank=True)
            return output.failed("error", words, PacelineError.exit_code)


def _is_mistyped(args: Sequence[str], names: Sequence[str]) -> bool:
    """Whether the first argument is probably a mistyped command.

    True for a bare word that is no file, if another argument follows
    (`validate sweep.yaml`) or a command has a similar name.
    """
    word, *rest = args
    is_bare = word.replace("-", "").replace("_", "").isalpha()
    if word.startswith("-") or not is_bare or Path(word).exists():
        return False
    is_followed = bool(rest) and not rest[0].startswith("-")
    return is_followed or nearest(word, names, cutoff=0.7) is not None


def leave(code: int) -> NoReturn:
    """End the process.

    Waits for threads and runs exit handlers, but does not tear down torch's
    modules, which would take a second.
    """
    threading._shutdown()  # type: ignore[attr-defined] # (what Python itself calls first)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def complain(
    sentences: str, level: str = "error", every_rank: bool = False
) -> None:
    """Print sentences to standard error, one per line.

    Under torchrun only rank 0 prints them, unless `every_rank` is set.
    """
    if every_rank or not torchrun_rank():
        for line in redact(sentences).splitlines():
            print(f"{level}: {line}", file=sys.stderr)


def entries(
    model: type[Settings], prefix: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, default, description) of each key of a class, depth first."""
    for name, field in keys_of(model).items():
        dotted = prefix + name
        below = child_model(model, name)
        if below is not None and get_origin(field.annotation) is not dict:
            yield from entries(below, f"{dotted}.")
            continue
        default = "required"
        if not field.is_required():
            default = show(field.get_default(call_default_factory=True))
        # A row of a Markdown table must be one line.
        description = " ".join((field.description or "").split())
        choices = get_args(field.annotation)
        if len(choices) > 1 and all(
            isinstance(choice, str) for choice in choices
        ):
            description += f" One of {', '.join(choices)}."
        yield dotted, default, description


def reference(model: type[Settings]) -> str:
    """Return a list of all keys of a configuration class, as text for a terminal."""
    lines = []
    for key, default, description in entries(model):
        lines.append(f"{key} ({default})")
        lines += textwrap.wrap(
            description, 100, initial_indent="    ", subsequent_indent="    "
        )
    return "\n".join(lines)
