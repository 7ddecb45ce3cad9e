"""The code interpreter by its unmodified SDK."""

import base64
import time

import pytest
from e2b import NotFoundException, SandboxException, TimeoutException

SLOW = 300


def run(sandbox, code, **options):
    options.setdefault("timeout", SLOW)
    options.setdefault("request_timeout", SLOW)
    return sandbox.run_code(code, **options)


def test_cells_keep_state_and_count(interpreter):
    first = run(interpreter, "x = 41\nprint('hello')\nx + 1")
    assert (first.text, first.logs.stdout, first.error) == ("42", ["hello\n"], None)
    second = run(interpreter, "x")
    assert (second.text, second.execution_count) == ("41", first.execution_count + 1)
    assert run(interpreter, "'a string'").text == "a string"


def test_errors_have_name_value_and_traceback(interpreter):
    error = run(interpreter, "def f():\n    raise ValueError('bad')\nf()").error
    assert (error.name, error.value) == ("ValueError", "bad")
    assert "raise ValueError('bad')" in error.traceback
    assert run(interpreter, "x = = 1").error.name == "SyntaxError"
    assert "input()" in run(interpreter, "input('name? ')").error.value


def test_output_is_streamed_with_times(interpreter):
    out, err = [], []
    run(
        interpreter,
        "import sys, time\nfor i in range(3):\n    print(i)\n    time.sleep(1)\nprint('e', file=sys.stderr)",
        on_stdout=lambda message: out.append((time.time(), message)),
        on_stderr=lambda message: err.append(message),
    )
    assert [message.line for _, message in out] == ["0\n", "1\n", "2\n"]
    assert out[2][0] - out[0][0] > 1
    assert abs(out[0][1].timestamp / 1e9 - time.time()) < 600
    assert [message.line for message in err] == ["e\n"]


def test_output_of_programs_is_seen(interpreter):
    cell = "import subprocess\nsubprocess.run(['echo', 'from a program'])\n!echo from the shell"
    assert "".join(run(interpreter, cell).logs.stdout) == "from a program\nfrom the shell\n"


def test_rich_results(interpreter):
    execution = run(
        interpreter,
        "class Rich:\n"
        "    def _repr_html_(self): return '<b>'\n"
        "    def _repr_markdown_(self): return '**'\n"
        "    def _repr_json_(self): return {'a': 1}\n"
        "    def _repr_png_(self): return b'bytes'\n"
        "display(Rich())\n"
        "Rich()",
    )
    shown, main = execution.results
    assert (shown.is_main_result, main.is_main_result) == (False, True)
    assert (main.html, main.markdown, main.json) == ("<b>", "**", {"a": 1})
    assert base64.b64decode(main.png) == b"bytes"
    html = run(interpreter, "from IPython.display import HTML\nHTML('<i>')").results[0]
    assert html.html == "<i>"


def test_top_level_await(interpreter):
    assert run(interpreter, "import asyncio\nawait asyncio.sleep(0.01, result='done')").text == "done"


def test_matplotlib_figures_are_images_and_charts(interpreter):
    execution = run(
        interpreter,
        "import matplotlib.pyplot as plt\n"
        "plt.plot([1, 2, 3], [2, 4, 8], label='growth')\n"
        "plt.title('A title'); plt.xlabel('time (s)')\n"
        "plt.show()",
    )
    assert execution.error is None
    (figure,) = [result for result in execution.results if result.png]
    assert base64.b64decode(figure.png).startswith(b"\x89PNG")
    assert figure.chart.title == "A title"
    assert figure.chart.elements[0].points == [(1, 2), (2, 4), (3, 8)]
    left_open = run(interpreter, "fig, ax = plt.subplots()\nax.bar(['a', 'b'], [1, 2])\nNone")
    assert [bool(result.png) for result in left_open.results] == [True]


def test_dataframes_are_tables(interpreter):
    execution = run(interpreter, "import pandas\npandas.DataFrame({'a': [1, 2], 'b': ['x', 'y']})")
    assert execution.error is None
    (result,) = execution.results
    assert "<table" in result.html
    assert result.text.split() == ["a", "b", "0", "1", "x", "1", "2", "y"]
    assert result.data == {"a": [1, 2], "b": ["x", "y"]}


def test_numpy_computes(interpreter):
    cell = "import numpy\nmatrix = numpy.arange(6.0).reshape(2, 3)\n(matrix @ matrix.T).tolist()"
    execution = run(interpreter, cell)
    assert (execution.error, execution.text) == (None, "[[5.0, 14.0], [14.0, 50.0]]")


def test_results_and_errors_are_handed_to_callbacks(interpreter):
    results, errors = [], []
    options = {"on_result": results.append, "on_error": errors.append}
    run(interpreter, "display(1)\n2", **options)
    run(interpreter, "1 / 0", **options)
    assert [result.text for result in results] == ["1", "2"]
    assert [error.name for error in errors] == ["ZeroDivisionError"]


def test_large_output_arrives_whole(interpreter):
    execution = run(interpreter, "for i in range(2000):\n    print(i, 'x' * 500)")
    lines = "".join(execution.logs.stdout).splitlines()
    assert lines == [f"{i} {'x' * 500}" for i in range(2000)]


def test_environment_is_of_the_cell_alone(interpreter):
    cell = "import os; os.environ.get('WORD')"
    assert run(interpreter, cell, envs={"WORD": "here"}).text == "here"
    assert run(interpreter, cell).text is None


def test_contexts_are_apart(interpreter):
    context = interpreter.create_code_context(cwd="/tmp", request_timeout=SLOW)
    assert context.cwd == "/tmp"
    run(interpreter, "mine = 1", context=context)
    assert run(interpreter, "import os; os.getcwd()", context=context).text == "/tmp"
    assert run(interpreter, "mine").error.name == "NameError"
    assert context.id in [each.id for each in interpreter.list_code_contexts()]
    interpreter.restart_code_context(context)
    assert run(interpreter, "mine", context=context).error.name == "NameError"
    interpreter.remove_code_context(context)
    with pytest.raises(NotFoundException):
        run(interpreter, "1", context=context)


def test_timeout_interrupts_and_state_stays(interpreter):
    run(interpreter, "kept = 'kept'")
    with pytest.raises(TimeoutException):
        run(interpreter, "import time\nwhile True: time.sleep(0.1)", timeout=5)
    assert run(interpreter, "kept").text == "kept"


def test_kernel_death_is_told_and_repaired(interpreter):
    error = run(interpreter, "import os; os._exit(1)").error
    assert error.name == "KernelDied"
    assert run(interpreter, "1 + 1").text == "2"


def test_bash_keeps_its_state(interpreter):
    run(interpreter, "WORD=kept; cd /tmp", language="bash")
    execution = run(interpreter, "echo $WORD $PWD; exit_code() { return 3; }; exit_code", language="bash")
    assert "".join(execution.logs.stdout) == "kept /tmp\n"
    assert execution.error.value == "3"


def test_unknown_language_is_refused(interpreter):
    with pytest.raises(SandboxException, match="not supported"):
        run(interpreter, "1", language="cobol")
