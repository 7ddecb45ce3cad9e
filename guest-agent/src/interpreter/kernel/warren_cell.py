"""Running one cell: parsing, the value of its last expression, errors."""

import ast
import builtins
import inspect
import linecache
import os
import random
import re
import signal
import sys
import types

import warren_display
import warren_inline
import warren_traceback


class StdinNotImplementedError(NotImplementedError):
    """Raised by input(): nobody is there to answer."""


_seed = random.seed
_user_seeded = False


def reseed(number):
    """Reseeds `random`, unless the program chose its state itself."""
    if not _user_seeded:
        _seed(number)


def _watch_seed():
    def seed(*arguments, **keywords):
        global _user_seeded
        _user_seeded = bool(keywords) or bool(arguments and arguments[0] is not None)
        return _seed(*arguments, **keywords)

    seed.__doc__ = _seed.__doc__
    random.seed = seed


def _no_input(prompt=""):
    raise StdinNotImplementedError(
        "input() is not available: the code interpreter has no standard input"
    )


class Kernel:
    """State of a context: its namespace, its counter, its event loop."""

    def __init__(self, emit):
        self.emit = emit
        self.count = 0
        self.loop = None
        self.running = False
        module = types.ModuleType("__main__")
        module.__dict__.update(
            __builtins__=builtins, _=None, display=warren_display.display, In=[""], Out={}
        )
        sys.modules["__main__"] = module
        self.namespace = module.__dict__
        self.shell = Shell(self)
        builtins.input = _no_input
        builtins.display = warren_display.display
        builtins.get_ipython = lambda: self.shell
        self.namespace["get_ipython"] = builtins.get_ipython
        _watch_seed()
        signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, *_):
        # Between cells there is nothing to interrupt.
        if self.running:
            raise KeyboardInterrupt

    def execute(self, code, env_vars):
        self.count += 1
        self.emit({"type": "number_of_executions", "execution_count": self.count}, more=True)
        self.namespace["In"].append(code)
        before = {name: os.environ.get(name) for name in env_vars}
        os.environ.update(env_vars)
        try:
            self.running = True
            self._run(code)
            warren_inline.flush()
        except SystemExit as error:
            self.emit(
                {
                    "type": "error",
                    "name": "SystemExit",
                    "value": str(error.code),
                    "traceback": f"SystemExit: {error.code}",
                }
            )
        except BaseException as error:
            self.emit({"type": "error", **warren_traceback.describe(error)}, more=True)
            warren_inline.discard()
        finally:
            self.running = False
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except (OSError, ValueError):
                    pass

    def _run(self, code):
        name = f"<cell {self.count}>"
        tree, code = parse(code, name)
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not ends_quietly(code):
            last = ast.Expression(tree.body.pop().value)
        if tree.body:
            self._evaluate(compile_tree(tree, name, "exec"))
        if last is None:
            return
        value = self._evaluate(compile_tree(last, name, "eval"))
        if value is not None:
            self.namespace["_"] = value
            self.namespace["Out"][self.count] = value
            warren_display.emit_result(value, is_main=True)

    def _evaluate(self, code):
        result = eval(code, self.namespace)
        if code.co_flags & inspect.CO_COROUTINE:
            return self._event_loop().run_until_complete(result)
        return result

    def _event_loop(self):
        """One loop for the context, so that its tasks live from cell to cell."""
        if self.loop is None or self.loop.is_closed():
            import asyncio

            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        return self.loop


def compile_tree(tree, name, mode):
    return compile(tree, name, mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def parse(code, name):
    """The syntax tree, and the code it is of: lines that only a notebook
    understands are rewritten when Python does not take them."""
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    if not code.lstrip().startswith("%%"):
        try:
            return compile(code, name, "exec", flags, dont_inherit=True), code
        except SyntaxError:
            rewritten = rewrite(code)
            if rewritten == code:
                raise
    else:
        rewritten = rewrite_cell(code)
    return compile(rewritten, name, "exec", flags, dont_inherit=True), rewritten


def ends_quietly(code):
    """Whether the cell ends with a semicolon, which hides the value."""
    import io
    import tokenize

    last = None
    try:
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.type not in (
                tokenize.COMMENT,
                tokenize.NL,
                tokenize.NEWLINE,
                tokenize.ENDMARKER,
                tokenize.DEDENT,
            ):
                last = token
    except (tokenize.TokenError, SyntaxError):
        return False
    return last is not None and last.type == tokenize.OP and last.string == ";"


_ASSIGNED = re.compile(r"^(\s*[\w, ]+=\s*)([!%])\s*(.+)$")
_LINE = re.compile(r"^(\s*)([!%])\s*(.+)$")


def rewrite(code):
    """`!command` and `%magic` as calls."""
    lines = []
    for line in code.split("\n"):
        assigned, plain = _ASSIGNED.match(line), _LINE.match(line)
        if plain:
            method = "system" if plain[2] == "!" else "run_line_magic_text"
            line = f"{plain[1]}get_ipython().{method}({plain[3]!r})"
        elif assigned:
            method = "getoutput" if assigned[2] == "!" else "run_line_magic_text"
            line = f"{assigned[1]}get_ipython().{method}({assigned[3]!r})"
        lines.append(line)
    return "\n".join(lines)


def rewrite_cell(code):
    """`%%magic` over a whole cell as one call."""
    first, _, body = code.lstrip().partition("\n")
    return f"get_ipython().run_cell_magic_text({first[2:].strip()!r}, {body!r})"


class Shell:
    """The few things that notebooks ask their shell for."""

    def __init__(self, kernel):
        self._kernel = kernel
        self.user_ns = kernel.namespace

    @property
    def execution_count(self):
        return self._kernel.count

    def system(self, command):
        import subprocess

        sys.stdout.flush()
        status = subprocess.run(["bash", "-c", self._expand(command)]).returncode
        self.user_ns["_exit_code"] = status

    def getoutput(self, command):
        import subprocess

        done = subprocess.run(
            ["bash", "-c", self._expand(command)], stdout=subprocess.PIPE, text=True
        )
        return done.stdout.splitlines()

    def _expand(self, command):
        """`{expression}` of the namespace, when it is one."""

        def value(match):
            try:
                return str(eval(match[1], self.user_ns))
            except Exception:
                return match[0]

        return re.sub(r"\{([^{}]+)\}", value, command)

    def run_line_magic_text(self, text):
        name, _, rest = text.partition(" ")
        return self.run_line_magic(name, rest.strip())

    def run_line_magic(self, name, line):
        if name == "pip":
            return self.system(f"{sys.executable} -m pip {line}")
        if name == "cd":
            os.chdir(os.path.expanduser(line or "~"))
            return print(os.getcwd())
        if name == "pwd":
            return os.getcwd()
        if name in ("env", "set_env"):
            key, equals, value = line.partition("=")
            if not key:
                return dict(os.environ)
            if not equals:
                return os.environ.get(key)
            os.environ[key.strip()] = value.strip()
            return None
        if name in ("matplotlib", "load_ext", "reload_ext", "autoreload", "config"):
            return None
        if name == "time":
            import time

            start = time.perf_counter()
            self._kernel._run(line)
            return print(f"Wall time: {time.perf_counter() - start:.3g} s")
        raise NameError(f"the line magic %{name} is not available here")

    def run_cell_magic_text(self, first, body):
        name, _, rest = first.partition(" ")
        return self.run_cell_magic(name, rest.strip(), body)

    def run_cell_magic(self, name, line, body):
        if name in ("bash", "sh"):
            import subprocess

            sys.stdout.flush()
            status = subprocess.run([name, "-c", body]).returncode
            if status:
                raise subprocess.CalledProcessError(status, f"%%{name}")
            return None
        if name == "writefile":
            with open(os.path.expanduser(line), "w") as file:
                file.write(body)
            return print(f"Writing {line}")
        if name == "time":
            import time

            start = time.perf_counter()
            self._kernel._run(body)
            return print(f"Wall time: {time.perf_counter() - start:.3g} s")
        if name == "capture":
            return self._kernel._run(body)
        raise NameError(f"the cell magic %%{name} is not available here")

